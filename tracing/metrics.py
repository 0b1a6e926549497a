"""Every metric that a service exports: one catalogue, by which collectors, dashboard and documentation are checked.

Names are those of `meshift.tracing.names` in Prometheus' form: dots become underscores, the unit is appended.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from meshift.tracing import names


class Kind(StrEnum):
    """What a metric is."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One family."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    unit: str = ""

    @property
    def family(self) -> str:
        """Its name in Prometheus, without `_total` and the like."""
        base = self.name.replace(".", "_")
        return f"{base}_{self.unit}" if self.unit else base

    @property
    def series(self) -> tuple[str, ...]:
        """The names that a query can use."""
        if self.kind is Kind.COUNTER:
            return (f"{self.family}_total",)
        if self.kind is Kind.HISTOGRAM:
            return tuple(f"{self.family}_{suffix}" for suffix in ("bucket", "sum", "count"))
        return (self.family,)


_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

# ---- frontend ----

TIME_TO_FIRST_TOKEN: Final = Metric(
    names.METRIC_TIME_TO_FIRST_TOKEN, _H, "From a request's arrival at the core to its first token.", unit="seconds"
)
INTER_TOKEN: Final = Metric(names.METRIC_INTER_TOKEN, _H, "From one token to the next, as they arrive.", unit="seconds")
TIME_PER_OUTPUT_TOKEN: Final = Metric(
    names.METRIC_TIME_PER_OUTPUT_TOKEN, _H, "Mean time a token after the first, of each request.", unit="seconds"
)
REQUEST_DURATION: Final = Metric(
    names.METRIC_REQUEST_DURATION, _H, "From a request's arrival at the core to its end.", unit="seconds"
)
OPEN_STREAMS: Final = Metric(names.METRIC_OPEN_STREAMS, _G, "Requests that have not ended.")
STREAMS_ENDED: Final = Metric(
    names.METRIC_STREAMS_ENDED, _C, "Requests that ended, by finish reason; `failed` ended in an error.", ("reason",)
)
TOKENS: Final = Metric(names.METRIC_TOKENS, _C, "Tokens of ended requests.", ("type",))
RESUMES: Final = Metric(names.METRIC_RESUMES, _C, "Streams that lost their owner and were submitted elsewhere.")
STALE_EVENTS: Final = Metric(names.METRIC_STALE_EVENTS, _C, "Token events of superseded owners or ended requests.")
ASKS: Final = Metric(names.METRIC_ASKS, _C, "Questions to owners for missing tokens, by outcome.", ("outcome",))
PLACEMENTS: Final = Metric(
    names.METRIC_PLACEMENTS, _C, "Owners chosen, by who chose: `scheduler`, or `bypass` for the frontend.", ("by",)
)
BYPASS: Final = Metric(names.METRIC_BYPASS, _G, "1 while the frontend dispatches without a scheduler.")
HTTP_REQUESTS: Final = Metric(
    names.METRIC_HTTP_REQUESTS,
    _C,
    "HTTP requests, by route and status; 499: the client left before the answer.",
    ("route", "status"),
)
HTTP_DURATION: Final = Metric(
    names.METRIC_HTTP_DURATION, _H, "From the request's head to the answer's end.", ("route",), "seconds"
)

# ---- instances, as the frontend hears of them ----

KV_CAPACITY: Final = Metric(names.METRIC_KV_CAPACITY, _G, "Tokens that an instance's KV cache holds.", ("instance_id",))
KV_TOKENS: Final = Metric(
    names.METRIC_KV_TOKENS,
    _G,
    "Tokens in the KV cache: used, cached, free and reserved add up to the capacity.",
    ("instance_id", "state"),
)
REQUESTS: Final = Metric(
    names.METRIC_REQUESTS, _G, "Requests of an instance's engine: running (in the batch) or waiting.",
    ("instance_id", "state"),
)  # fmt: skip
FREENESS: Final = Metric(
    names.METRIC_FREENESS, _G, "Decode steps that the batch can still take (Llumnix).", ("instance_id",)
)
INSTANCE_STATE: Final = Metric(
    names.METRIC_INSTANCE_STATE, _G, "1 for the state that an instance reports.", ("instance_id", "state")
)

# ---- worker ----

ENGINE_STEPS: Final = Metric(names.METRIC_ENGINE_STEPS, _C, "Steps of the engine.", ("instance_id",))
SUBMISSIONS: Final = Metric(
    names.METRIC_SUBMISSIONS, _C, "Submissions, by outcome: accepted, or the code of the refusal.",
    ("instance_id", "outcome"),
)  # fmt: skip
REQUESTS_ENDED: Final = Metric(
    names.METRIC_REQUESTS_ENDED, _C, "Requests that the engine ended, by finish reason.", ("instance_id", "reason")
)
PREEMPTIONS: Final = Metric(names.METRIC_PREEMPTIONS, _C, "Preemptions of ended requests.", ("instance_id",))
PREEMPTION_LOSS: Final = Metric(
    names.METRIC_PREEMPTION_LOSS, _C, "Time that ended requests lost to preemptions.", ("instance_id",), "seconds"
)
UNACKNOWLEDGED: Final = Metric(
    names.METRIC_UNACKNOWLEDGED, _G, "Finishes that no frontend has acknowledged yet.", ("instance_id",)
)
RESENT: Final = Metric(names.METRIC_RESENT, _C, "Finishes sent again for want of an acknowledgement.", ("instance_id",))
LEASES_ENDED: Final = Metric(
    names.METRIC_LEASES_ENDED, _C, "Requests ended because their frontend's lease had.", ("instance_id",)
)
BATCHES_LOST: Final = Metric(
    names.METRIC_BATCHES_LOST, _C, "Token messages that the bus did not take; they are asked for.", ("instance_id",)
)

KV_RESIDENT: Final = Metric(
    names.METRIC_KV_RESIDENT, _G, "KV memory that the system keeps for all ranks.", ("instance_id",), "bytes"
)
KV_PAGES: Final = Metric(names.METRIC_KV_PAGES, _G, "Pages of the KV capacity.", ("instance_id",))
KV_PAGE_TOKENS: Final = Metric(names.METRIC_KV_PAGE_TOKENS, _G, "Tokens a page.", ("instance_id",))
KV_GROUPS: Final = Metric(names.METRIC_KV_GROUPS, _G, "Groups of stacked layers.", ("instance_id",))
KV_GROUP_LAYERS: Final = Metric(
    names.METRIC_KV_GROUP_LAYERS, _G, "Layers of a group: every group but the last (`full`), and that (`last`).",
    ("instance_id", "group"),
)  # fmt: skip
KV_UNITS: Final = Metric(
    names.METRIC_KV_UNITS, _G, "Units of KV memory of all ranks: `committed` or `given_up`.", ("instance_id", "state")
)
KV_COMMITTED: Final = Metric(
    names.METRIC_KV_COMMITTED, _G, "Size of the committed units of all ranks.", ("instance_id",), "bytes"
)
KV_WASTE: Final = Metric(
    names.METRIC_KV_WASTE, _G, "What no token can use of the committed units.", ("instance_id",), "bytes"
)
KV_UNIT_WASTE: Final = Metric(
    names.METRIC_KV_UNIT_WASTE, _G, "What no token can use of one unit, of a full group or of the last.",
    ("instance_id", "group"), "bytes",
)  # fmt: skip

LAYOUT_EPOCH: Final = Metric(
    names.METRIC_LAYOUT_EPOCH, _G, "One more with every change of an instance's layout.", ("instance_id",)
)
LAYOUT_LAYERS: Final = Metric(
    names.METRIC_LAYOUT_LAYERS, _G, "Layers of each pipeline stage.", ("instance_id", "stage")
)
LAYOUT_CHANGES: Final = Metric(
    names.METRIC_LAYOUT_CHANGES, _C, "Changes of the layout that ended: committed or aborted, and why.",
    ("instance_id", "outcome", "refusal"),
)  # fmt: skip
LAYOUT_BYTES: Final = Metric(
    names.METRIC_LAYOUT_BYTES, _C, "KV copied between stages for changes of the layout.", ("instance_id",), "bytes"
)
LAYOUT_ROUNDS: Final = Metric(
    names.METRIC_LAYOUT_ROUNDS, _C, "Rounds of KV copied between stages, patches included.", ("instance_id",)
)
LAYOUT_DURATION: Final = Metric(
    names.METRIC_LAYOUT_DURATION, _H, "From a change's begin to its end, where it was committed.", ("instance_id",),
    "seconds",
)  # fmt: skip
LAYOUT_STOP: Final = Metric(
    names.METRIC_RECONFIGURE_STOP, _H, "How long the stage was held back at a commit that was held back longest.",
    ("instance_id",), "seconds",
)  # fmt: skip

MOVES: Final = Metric(
    names.METRIC_MOVES, _C, "Moves away that ended, by mode, outcome, and refusal (`none`, or why it came to nothing).",
    ("instance_id", "mode", "outcome", "refusal"),
)  # fmt: skip
MOVES_IN: Final = Metric(
    names.METRIC_MOVES_IN, _C, "Moves to this instance that ended: committed or aborted.", ("instance_id", "outcome")
)
MOVES_RUNNING: Final = Metric(
    names.METRIC_MOVES_RUNNING, _G, "Moves under way: out of this instance, or into it.", ("instance_id", "direction")
)
MOVE_DURATION: Final = Metric(
    names.METRIC_MOVE_DURATION, _H, "From the order to the change of owner.", ("instance_id",), "seconds"
)
MOVE_FROZEN: Final = Metric(
    names.METRIC_MOVE_FROZEN,
    _H,
    "From a request's last step at the source until the destination may step it.",
    ("instance_id",),
    "seconds",
)
MOVE_ROUNDS: Final = Metric(names.METRIC_MOVE_ROUNDS, _C, "Rounds of KV sent for moves.", ("instance_id",))
MOVE_TOKENS: Final = Metric(names.METRIC_MOVE_TOKENS, _C, "Tokens whose KV was sent for moves.", ("instance_id",))
MOVE_BYTES: Final = Metric(names.METRIC_MOVE_BYTES, _C, "KV sent for moves.", ("instance_id",), "bytes")

# ---- scheduler ----

DISPATCHES: Final = Metric(
    names.METRIC_DISPATCHES,
    _C,
    "Dispatches, by decision: fits, waits (there, for room), held (told to ask again), or the code of the refusal.",
    ("decision",),
)
DISPATCH_DURATION: Final = Metric(names.METRIC_DISPATCH_DURATION, _H, "Time to decide.", unit="seconds")
SCALINGS: Final = Metric(
    names.METRIC_SCALINGS, _C, "Instances to be started or drained, by action; `dry_...` was only said.", ("action",)
)
SCALING_FAILURES: Final = Metric(
    names.METRIC_SCALING_FAILURES, _C, "Orders to start or drain one that were refused or not answered."
)
INSTANCES: Final = Metric(names.METRIC_INSTANCES, _G, "Live instances that the scheduler knows.")

# ---- coordinator ----

RECONFIGURATIONS: Final = Metric(
    names.METRIC_RECONFIGURATIONS, _C, "Reconfigurations that ended, by outcome, and refusal (`none`, or why).",
    ("outcome", "refusal"),
)  # fmt: skip
RECONFIGURATIONS_RUNNING: Final = Metric(
    names.METRIC_RECONFIGURATIONS_RUNNING, _G, "Reconfigurations that are under way."
)
RECONFIGURATIONS_ADOPTED: Final = Metric(
    names.METRIC_RECONFIGURATIONS_ADOPTED, _C, "Reconfigurations that were under way when the coordinator came."
)
RECONFIGURATION_PHASE: Final = Metric(
    names.METRIC_RECONFIGURATION_PHASE, _H, "How long each phase took, where it was committed.", ("phase",), "seconds"
)

# ---- every service ----

BUS_PUBLISHED: Final = Metric(names.METRIC_BUS_PUBLISHED, _C, "Messages sent.", ("service",))
BUS_RECEIVED: Final = Metric(names.METRIC_BUS_RECEIVED, _C, "Messages received.", ("service",))
BUS_DROPPED: Final = Metric(names.METRIC_BUS_DROPPED, _C, "Messages lost to a full queue.", ("service",))
BUS_INVALID: Final = Metric(names.METRIC_BUS_INVALID, _C, "Messages that did not validate.", ("service",))
BUS_HANDLER_ERRORS: Final = Metric(names.METRIC_BUS_HANDLER_ERRORS, _C, "Messages whose handler failed.", ("service",))
BUS_RECONNECTS: Final = Metric(names.METRIC_BUS_RECONNECTS, _C, "Connections to NATS made again.", ("service",))

METRICS: Final[dict[str, Metric]] = {
    metric.family: metric for metric in list(vars().values()) if isinstance(metric, Metric)
}
"""By family."""
