"""Another KV capacity of the simulated engine, at a step boundary."""

from meshift.backends.base import KvMemoryNow, KvResized
from meshift.backends.sim.clock import Clock
from meshift.backends.sim.core import EngineCore
from meshift.backends.sim.lifecycle import RequestState


class Resizing:
    """`pages_max`: the operator's bound."""

    def __init__(self, core: EngineCore, clock: Clock, pages_max: int) -> None:
        self._core = core
        self._clock = clock
        self.pages_max = pages_max
        self.held = ""
        """Why it may not grow now."""

    async def resize(self, capacity: int, preempt: bool) -> KvResized:
        """See `ResizableEngine`. Raises ConnectionError if the engine ends before."""
        done = self._clock.future()

        def act() -> int:
            if not done.done():
                done.set_result(self._apply(capacity // self._core.parameters.page_size, preempt))
            return 0

        self._core.at_boundary(act)
        return await self._clock.wait_or_lose(done)  # type: ignore[no-any-return]

    def now(self) -> KvMemoryNow:
        """See `ResizableEngine`."""
        return KvMemoryNow(self._request_tokens_max(), self._bytes(self._core.pool.capacity), None)

    def _apply(self, wanted: int, preempt: bool) -> KvResized:
        pool, core = self._core.pool, self._core
        before, reason = pool.capacity, ""
        if wanted > before and self.held:
            wanted, reason = before, self.held
        if wanted > self.pages_max:
            wanted, reason = self.pages_max, "the engine was started with no more room"
        least = self._least()
        if wanted < least:
            wanted, reason = least, f"a request here may need {least * core.parameters.page_size} tokens"
        preempted = self._make_room(before - wanted) if preempt else 0
        if before - wanted > pool.free:
            wanted, reason = before - pool.free, "requests hold the rest"
        pool.resize(wanted)
        return KvResized(
            capacity=pool.capacity * core.parameters.page_size,
            request_tokens_max=self._request_tokens_max(),
            evicted=0,
            preempted=preempted,
            released_bytes=self._bytes(max(0, before - wanted)),
            resident_bytes=self._bytes(wanted),
            reason=reason,
            duration_ns=0,
        )

    def _make_room(self, pages: int) -> int:
        preempted = 0
        while pages > self._core.pool.free and len(self._core.batch):
            self._core.preempt(self._core.batch.newest())
            preempted += 1
        return preempted

    def _least(self) -> int:
        """Pages without which some request here could never end."""
        parameters = self._core.parameters
        needs = (
            parameters.pages_of(request.generation.prompt + request.generation.sampling.max_new_tokens - 1)
            for request in self._core.requests
            if request.state is not RequestState.GONE
        )
        return max(1, max(needs, default=1))

    def _request_tokens_max(self) -> int:
        # The last token's KV is never computed.
        return self._core.pool.capacity * self._core.parameters.page_size + 1

    def _bytes(self, pages: int) -> int:
        return pages * self._core.parameters.page_size * self._core.parameters.kv_token_bytes
