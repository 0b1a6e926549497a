"""Which waiting requests start together."""

from dataclasses import dataclass

from meshift.backends.sim.lifecycle import RequestEvent
from meshift.backends.sim.pages import PagePool
from meshift.backends.sim.parameters import SimParameters
from meshift.backends.sim.pipeline import Timing
from meshift.backends.sim.request import SimRequest
from meshift.backends.sim.waiting import WaitingQueue


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """Requests whose prompts (and outputs, after a preemption or a resume) are computed at once."""

    requests: list[SimRequest]
    duration_ns: int


def admit(
    queue: WaitingQueue, pool: PagePool, parameters: SimParameters, timing: Timing, now_ns: int
) -> PrefillBatch | None:
    """Take from the queue's head what fits into free pages and one batch, with its pages. None if the head doesn't."""
    admitted: list[SimRequest] = []
    tokens = squares = 0
    while (request := queue.head) is not None:
        count, pages = request.known, queue.pages_of(request)
        if pages > pool.free or (admitted and tokens + count > parameters.prefill_tokens_max):
            break
        queue.pop()
        pool.take(pages)
        request.pages = pages
        request.admitted_ns = now_ns
        request.queued_ns = None if request.preemptions else now_ns - request.arrived_ns
        request.enter(RequestEvent.ADMIT)
        admitted.append(request)
        tokens += count
        squares += count * count
    return PrefillBatch(admitted, timing.prefill_ns(tokens, squares)) if admitted else None
