"""Running requests that lose their KV for a smaller capacity: who, when, and back into the queue.

With several stages a request may be taken out of its batch only when no step with it is launched. The other
micro-batches always are, so whoever has to go is chosen at once, among all of them, and goes at the turn of its own
micro-batch: within one round of the loop. Every rank finds the same at the same iteration.

The overlap scheduler has always launched a step with it. It goes nevertheless, as SGLang's own retraction lets it, but
must not be prefilled again before the result of that step has come, which SGLang would take for the prefill's."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshift.backends.sglang.plugin.batches import Batches


class Retractions:
    """Requests on their way from a batch back into the queue."""

    def __init__(self, scheduler: Any, batches: "Batches") -> None:
        self._scheduler = scheduler
        self._batches = batches
        self._between: list[Any] = []

    def __len__(self) -> int:
        return len(self._between)

    def __contains__(self, req: Any) -> bool:
        return req in self._between

    def retract(self, req: Any) -> None:
        """Free all of its memory but what others share. `can_leave` of the batches says whether it may go."""
        batch = next(batch for batch in self._batches.running() if req in batch.reqs)
        batch.release_req(batch.reqs.index(req), 0)
        self._batches.remove(req)
        self._between.append(req)

    def requeue(self) -> None:
        """At every boundary: those of which no step is launched any more wait from now on."""
        waiting, self._between = self._between, []
        for req in waiting:
            if self._batches.is_launched(req):
                self._between.append(req)
            else:
                self._scheduler._add_request_to_queue(req, is_retracted=True)


class Doomed:
    """Those who have to go, chosen anew when they are gone and it wasn't enough."""

    def __init__(self, scheduler: Any, batches: "Batches", retractions: Retractions) -> None:
        self._scheduler = scheduler
        self._batches = batches
        self._retractions = retractions
        self._chosen: list[Any] = []
        self.preempted = 0

    def go(self, missing: Callable[[], int]) -> bool:
        """Retract who can go now, while tokens are missing; False if nobody is left who could ever go."""
        while (short := missing()) > 0:
            self._chosen = [req for req in self._chosen if self._may_go(req)] or self._choose(short)
            leaving = next((req for req in self._chosen if self._batches.can_leave(req)), None)
            if leaving is None:
                return bool(self._chosen)
            self._chosen.remove(leaving)
            self._retractions.retract(leaving)
            self.preempted += 1
        return True

    def _choose(self, tokens: int) -> list[Any]:
        """Those whom SGLang would retract first, as many as hold so many tokens of their own."""
        reqs = list({id(req): req for batch in self._batches.running() for req in batch.reqs}.values())
        candidates = [req for req in reqs if self._may_go(req)]
        order = self._scheduler.running_batch._get_decode_retraction_order(candidates)
        chosen: list[Any] = []
        while order and tokens > 0:
            req = candidates[order.pop()]
            chosen.append(req)
            tokens -= req.kv.kv_allocated_len - req.kv.cache_protected_len
        return chosen

    def _may_go(self, req: Any) -> bool:
        """Whether it decodes, or has just been prefilled."""
        if req.finished() or not req.kv.holds_kv or not req.output_ids or self._batches.is_in_prefill(req):
            return False
        return any(req in batch.reqs for batch in self._batches.running())


def spare_the_last(original: Callable[[Any], Any], batch: Any) -> Any:
    """Around `ScheduleBatch.retract_decode`. SGLang ends the last request of a batch with an error when its next token
    has no memory. Others may hold that: other micro-batches, requests that are moving. Then it waits in the queue, as
    those before it."""
    retracted, ratio, aborted = original(batch)
    rows = batch.req_to_token_pool
    if len(rows.free_slots) < rows.size:
        spared = [req for req in aborted if not req.kv.holds_kv and req.beam_group is None]
        for req in spared:
            req.to_finish = None
        retracted += spared
        aborted = [req for req in aborted if req not in spared]
    return retracted, ratio, aborted
