"""Names of spans, attributes, events and metrics: one place, so that dashboards and tests can rely on them.

Where OpenTelemetry's semantic conventions for generative AI have a name, it is theirs (`gen_ai.*`);
everything else is `meshift.*`. Units follow the conventions: seconds, bytes (`By`), tokens (`{token}`).

One request gives one trace:

    POST /v1/chat/completions         frontend's HTTP shell; child of the client's span, if it sent a `traceparent`
    +-- chat <model>                  frontend's core: from the call to the last token
        +-- meshift.dispatch          frontend asks for an instance
        |   +-- meshift.decide        scheduler: its decision
        +-- meshift.submit            frontend hands it to the worker
        |   +-- meshift.generate      worker: from the submission to the finish or the move away
        |       +-- meshift.queue     engine: until its prefill begins, where the engine tells
        |       +-- meshift.prefill   engine: until the first token
        |       +-- meshift.decode    engine: from the first token to the finish
        +-- meshift.ask               frontend asks the owner for tokens that it misses
        +-- meshift.resume            frontend, after an owner was lost; links the lost submission
            +-- meshift.dispatch, meshift.submit as above, with the next attempt

One move of a request gives one trace, which links the request's `meshift.generate` at the source. What the request does
at the destination goes on in its own trace: a `meshift.generate` below that of the source.

    meshift.move                      source worker: from the order to the outcome
    +-- meshift.decide                scheduler: where to, if the order names no destination
    +-- meshift.move.reserve          asks the destination for room, once a round
    +-- meshift.move.round            one live round of the copy
    |   +-- meshift.move.transfer     on the data plane: until every rank has applied it
    +-- meshift.move.freeze           out of the batch, and the last round
    |   +-- meshift.move.transfer
    +-- meshift.move.commit           the destination takes it over
    +-- meshift.move.ask, .fence      who owns it? after a lost answer
    +-- meshift.move.release          the source frees it, or
    +-- meshift.move.resume           goes on with it
"""

from typing import Final

# ---- spans ----

DISPATCH: Final = "meshift.dispatch"
DECIDE: Final = "meshift.decide"
SUBMIT: Final = "meshift.submit"
GENERATE: Final = "meshift.generate"
QUEUE: Final = "meshift.queue"
PREFILL: Final = "meshift.prefill"
DECODE: Final = "meshift.decode"
ASK: Final = "meshift.ask"
RESUME: Final = "meshift.resume"

MOVE: Final = "meshift.move"
MOVE_RESERVE: Final = "meshift.move.reserve"
MOVE_ROUND: Final = "meshift.move.round"
MOVE_TRANSFER: Final = "meshift.move.transfer"
MOVE_FREEZE: Final = "meshift.move.freeze"
MOVE_COMMIT: Final = "meshift.move.commit"
MOVE_ASK: Final = "meshift.move.ask"
MOVE_FENCE: Final = "meshift.move.fence"
MOVE_RELEASE: Final = "meshift.move.release"
MOVE_RESUME: Final = "meshift.move.resume"

RECONFIGURE: Final = "meshift.reconfigure"
RECONFIGURE_ADOPT: Final = "meshift.reconfigure.adopt"
RECONFIGURE_BEGIN: Final = "meshift.reconfigure.begin"
RECONFIGURE_ABORT: Final = "meshift.reconfigure.abort"
RECONFIGURE_FEASIBILITY: Final = "meshift.reconfigure.feasibility"
RECONFIGURE_RESIZE: Final = "meshift.reconfigure.resize"
RECONFIGURE_LOAD: Final = "meshift.reconfigure.load"
RECONFIGURE_COPY: Final = "meshift.reconfigure.copy"
RECONFIGURE_COMMIT: Final = "meshift.reconfigure.commit"

DRAIN: Final = "meshift.drain"
SCHEDULE_MOVES: Final = "meshift.schedule_moves"

OPERATION_CHAT: Final = "chat"
OPERATION_COMPLETION: Final = "text_completion"


def request_span(operation: str, model: str) -> str:
    """The name of a frontend's server span, as the conventions want it: `chat llama-7b`."""
    return f"{operation} {model}"


# ---- attributes: the conventions' ----

HTTP_METHOD: Final = "http.request.method"
HTTP_ROUTE: Final = "http.route"
HTTP_STATUS: Final = "http.response.status_code"
ERROR_TYPE: Final = "error.type"
OPERATION: Final = "gen_ai.operation.name"
PROVIDER: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
REQUEST_TOP_P: Final = "gen_ai.request.top_p"
REQUEST_TOP_K: Final = "gen_ai.request.top_k"
REQUEST_FREQUENCY_PENALTY: Final = "gen_ai.request.frequency_penalty"
REQUEST_PRESENCE_PENALTY: Final = "gen_ai.request.presence_penalty"
REQUEST_STOP_SEQUENCES: Final = "gen_ai.request.stop_sequences"
REQUEST_SEED: Final = "gen_ai.request.seed"
REQUEST_STREAM: Final = "gen_ai.request.stream"
RESPONSE_ID: Final = "gen_ai.response.id"
RESPONSE_MODEL: Final = "gen_ai.response.model"
RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
RESPONSE_TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
USAGE_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
USAGE_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
USAGE_CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
TOKEN_TYPE: Final = "gen_ai.token.type"

# ---- attributes: ours ----

REQUEST_ID: Final = "meshift.request.id"
ATTEMPT: Final = "meshift.request.attempt"
HOP: Final = "meshift.request.hop"
PRIORITY_SCHEDULING: Final = "meshift.request.priority.scheduling"
PRIORITY_EXECUTION: Final = "meshift.request.priority.execution"
PREEMPTIONS: Final = "meshift.request.preemptions"
PREEMPTION_LOSS: Final = "meshift.request.preemption_loss"
"""Seconds."""
RESUMED_FROM: Final = "meshift.request.resumed_from"
"""Tokens of output that earlier attempts gave."""
REASON: Final = "meshift.reason"
"""Why an owner was given up, in words."""

OWNER: Final = "meshift.owner"
"""`instance#incarnation`."""
SOURCE: Final = "meshift.source"
DESTINATION: Final = "meshift.destination"
STAGE: Final = "meshift.stage"
RANK: Final = "meshift.rank"
LAYOUT_EPOCH: Final = "meshift.layout.epoch"

DISPATCH_REASON: Final = "meshift.dispatch.reason"
DISPATCH_CANDIDATES: Final = "meshift.dispatch.candidates"
"""Instances that could take it."""
DISPATCH_DEMAND: Final = "meshift.dispatch.demand"
"""Tokens that its prefill needs."""
DISPATCH_POLICY: Final = "meshift.dispatch.policy"
DISPATCH_REJECTED: Final = "meshift.dispatch.rejected"
"""What spoke against other instances, a few of them: `instance#incarnation: why`."""
DISPATCH_BYPASS: Final = "meshift.dispatch.bypass"
"""True if the frontend chose by itself, without a scheduler."""

TRANSFER_ID: Final = "meshift.transfer.id"
TRANSFER_STATE: Final = "meshift.transfer.state"
TRANSFER_ROUND: Final = "meshift.transfer.round"
TRANSFER_TOKENS: Final = "meshift.transfer.tokens"
TRANSFER_BYTES: Final = "meshift.transfer.bytes"
TRANSFER_WATERMARK: Final = "meshift.transfer.watermark"
TRANSFER_ABORT_REASON: Final = "meshift.transfer.abort_reason"
LAYOUT_CHANGE: Final = "meshift.layout.change"
LAYOUT_ADOPTED: Final = "meshift.layout.adopted"
"""Another coordinator had begun it."""
LAYOUT_FROM: Final = "meshift.layout.from"
LAYOUT_TO: Final = "meshift.layout.to"
LAYOUT_OUTCOME: Final = "meshift.layout.outcome"
LAYOUT_REFUSAL: Final = "meshift.layout.refusal"
LAYOUT_LOOK: Final = "meshift.layout.look"
"""An event: how far it is."""
LAYOUT_LAG: Final = "meshift.layout.lag_tokens"
LAYOUT_LOADED: Final = "meshift.layout.layers_loaded"
LAYOUT_ROUNDS: Final = "meshift.layout.rounds"
LAYOUT_LAST_TOKENS: Final = "meshift.layout.last_patch.tokens"
LAYOUT_LAST_BYTES: Final = "meshift.layout.last_patch.bytes"
LAYOUT_STOPS: Final = "meshift.layout.stops"
"""Seconds that each stage was held back."""
LAYOUT_MOVES_WAITED: Final = "meshift.layout.moves_waited"

MOVE_MODE: Final = "meshift.move.mode"
MOVE_OUTCOME: Final = "meshift.move.outcome"
MOVE_REFUSAL: Final = "meshift.move.refusal"
MOVE_ROUNDS: Final = "meshift.move.rounds"
TRANSFER_GATHER: Final = "meshift.transfer.gather"
"""Seconds of the step thread."""
TRANSFER_DURATION: Final = "meshift.transfer.duration"
"""Seconds."""
MOVE_FROZEN: Final = "meshift.move.frozen"
"""Seconds from the last step at the source to runnable at the destination."""

# ---- events of spans ----

EVENT_FIRST_TOKEN: Final = "meshift.first_token"
EVENT_PREEMPTED: Final = "meshift.preempted"
EVENT_OWNER_CHANGED: Final = "meshift.owner_changed"
EVENT_OWNER_LOST: Final = "meshift.owner_lost"

# ---- metrics: the conventions' ----

METRIC_REQUEST_DURATION: Final = "gen_ai.server.request.duration"
METRIC_TIME_TO_FIRST_TOKEN: Final = "gen_ai.server.time_to_first_token"
METRIC_TIME_PER_OUTPUT_TOKEN: Final = "gen_ai.server.time_per_output_token"
# ---- metrics: ours. What each is and where it is exported: `meshift.tracing.metrics` ----

METRIC_INTER_TOKEN: Final = "meshift.inter_token_latency"
METRIC_OPEN_STREAMS: Final = "meshift.streams.open"
METRIC_STREAMS_ENDED: Final = "meshift.streams.ended"
METRIC_TOKENS: Final = "meshift.tokens"
METRIC_RESUMES: Final = "meshift.resumes"
METRIC_STALE_EVENTS: Final = "meshift.stale_events"
METRIC_ASKS: Final = "meshift.asks"
METRIC_PLACEMENTS: Final = "meshift.placements"
METRIC_BYPASS: Final = "meshift.bypass"
METRIC_HTTP_REQUESTS: Final = "meshift.http.requests"
METRIC_HTTP_DURATION: Final = "meshift.http.request.duration"

METRIC_KV_CAPACITY: Final = "meshift.kv.capacity"
METRIC_KV_TOKENS: Final = "meshift.kv.tokens"
KV_STATE: Final = "meshift.kv.state"
"""`used`, `cached`, `free` or `reserved`."""
METRIC_KV_RESIDENT: Final = "meshift.kv.resident"
METRIC_KV_PAGES: Final = "meshift.kv.pages"
METRIC_KV_PAGE_TOKENS: Final = "meshift.kv.page_tokens"
METRIC_KV_GROUPS: Final = "meshift.kv.groups"
METRIC_KV_GROUP_LAYERS: Final = "meshift.kv.group_layers"
METRIC_KV_UNITS: Final = "meshift.kv.units"
METRIC_KV_COMMITTED: Final = "meshift.kv.committed"
METRIC_KV_WASTE: Final = "meshift.kv.waste"
METRIC_KV_UNIT_WASTE: Final = "meshift.kv.unit_waste"
METRIC_REQUESTS: Final = "meshift.requests"
REQUEST_STATE: Final = "meshift.request.state"
"""`running` or `waiting`."""
METRIC_FREENESS: Final = "meshift.freeness"
METRIC_INSTANCE_STATE: Final = "meshift.instance.state"
METRIC_INSTANCES: Final = "meshift.instances"

METRIC_ENGINE_STEPS: Final = "meshift.engine.steps"
METRIC_SUBMISSIONS: Final = "meshift.submissions"
METRIC_REQUESTS_ENDED: Final = "meshift.requests.ended"
METRIC_PREEMPTIONS: Final = "meshift.preemptions"
METRIC_PREEMPTION_LOSS: Final = "meshift.preemption.loss"
METRIC_UNACKNOWLEDGED: Final = "meshift.unacknowledged"
METRIC_RESENT: Final = "meshift.resent"
METRIC_LEASES_ENDED: Final = "meshift.leases.ended"
METRIC_BATCHES_LOST: Final = "meshift.batches.lost"

METRIC_LAYOUT_EPOCH: Final = "meshift.layout.epochs"
METRIC_LAYOUT_LAYERS: Final = "meshift.layout.layers"
METRIC_LAYOUT_CHANGES: Final = "meshift.layout.changes"
METRIC_LAYOUT_BYTES: Final = "meshift.layout.io"
METRIC_LAYOUT_ROUNDS: Final = "meshift.layout.copy_rounds"
METRIC_LAYOUT_DURATION: Final = "meshift.layout.duration"
METRIC_RECONFIGURATIONS: Final = "meshift.reconfigurations"
METRIC_RECONFIGURATIONS_RUNNING: Final = "meshift.reconfigurations.running"
METRIC_RECONFIGURATIONS_ADOPTED: Final = "meshift.reconfigurations.adopted"
METRIC_RECONFIGURATION_PHASE: Final = "meshift.reconfiguration.phase"
METRIC_MOVES: Final = "meshift.moves"
METRIC_MOVES_RUNNING: Final = "meshift.moves.running"
METRIC_MOVES_IN: Final = "meshift.moves.in"
METRIC_MOVE_DURATION: Final = "meshift.move.duration"
METRIC_MOVE_FROZEN: Final = "meshift.move.frozen_time"
METRIC_MOVE_ROUNDS: Final = "meshift.move.copy_rounds"
METRIC_MOVE_TOKENS: Final = "meshift.move.tokens"
METRIC_MOVE_BYTES: Final = "meshift.move.io"
METRIC_RECONFIGURE_STOP: Final = "meshift.reconfigure.stop"
"""Histogram, s: how long a commit holds the pipeline."""

METRIC_DISPATCHES: Final = "meshift.dispatches"
METRIC_DISPATCH_DURATION: Final = "meshift.dispatch.duration"

METRIC_SCALINGS: Final = "meshift.scalings"
METRIC_SCALING_FAILURES: Final = "meshift.scaling.failures"

METRIC_BUS_PUBLISHED: Final = "meshift.bus.published"
METRIC_BUS_RECEIVED: Final = "meshift.bus.received"
METRIC_BUS_DROPPED: Final = "meshift.bus.dropped"
METRIC_BUS_INVALID: Final = "meshift.bus.invalid"
METRIC_BUS_HANDLER_ERRORS: Final = "meshift.bus.handler_errors"
METRIC_BUS_RECONNECTS: Final = "meshift.bus.reconnects"
