"""What no policy of scaling can do without: the instances of an oracle, to which starts and moves cost nothing. Every
prompt is let in as it comes, the memory of the cluster is one pool that is full to the last token, and there are just
as many instances as that takes. (A full instance gives the most tokens a second: a step's time grows less than its
batch.)"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from meshift.backends.sim.parameters import SimParameters
from meshift.services.simulation.workload import Arrival

TICK_S = 0.25
PREFILL_SHARE_MAX = 0.5
"""Of an instance's time; the rest of a burst's prefills is for the next ticks."""


@dataclass(slots=True)
class _Request:
    tokens: float
    """Held now."""
    left: float
    """To be decoded."""


@dataclass(frozen=True, slots=True)
class OracleRun:
    """What it paid for."""

    instances_mean: float
    instance_s: float
    virtual_s: float
    """From the beginning to the end of the last request."""


def oracle(arrivals: Sequence[Arrival], parameters: SimParameters, instances_max: int) -> OracleRun:
    """`arrivals` in the order of their times, each of which an instance can hold. Steps take what they do at the mean
    batch; prefills take their time from them. Where even `instances_max` don't hold all, the steps are shared out."""
    capacity, cost = parameters.pages * parameters.page_size, parameters.step_cost(copying=False)
    active: list[_Request] = []
    coming = 0
    ticks = paid = 0
    prefill_s = 0.0
    while coming < len(arrivals) or active:
        while coming < len(arrivals) and arrivals[coming].arrival_s <= ticks * TICK_S:
            arrival = arrivals[coming]
            coming += 1
            active.append(_Request(arrival.input_tokens + 1.0, arrival.output_tokens - 1.0))
            prefill_s += parameters.prefill_ns(arrival.input_tokens, arrival.input_tokens**2) / 1e9
        tokens = sum(request.tokens for request in active)
        instances = min(max(ceil(tokens / capacity), 1), instances_max)
        ticks, paid = ticks + 1, paid + instances
        busy_s = min(prefill_s, PREFILL_SHARE_MAX * instances * TICK_S)
        prefill_s -= busy_s
        step_s = cost.step_ns(len(active) / instances, tokens / instances) / 1e9
        steps = (TICK_S - busy_s / instances) / step_s
        active = _advanced(active, steps * min(1.0, instances * capacity / max(tokens, 1.0)))
    return OracleRun(paid / max(ticks, 1), paid * TICK_S, ticks * TICK_S)


def _advanced(active: Sequence[_Request], steps: float) -> list[_Request]:
    for request in active:
        request.tokens += steps
        request.left -= steps
    return [request for request in active if request.left > 0]
