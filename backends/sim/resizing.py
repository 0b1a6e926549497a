"""The number of pages of a running engine, changed at a step boundary as everything from outside."""

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshift.backends.sim.clock import Clock

if TYPE_CHECKING:
    from meshift.backends.sim.core import EngineCore
    from meshift.backends.sim.request import SimRequest


@dataclass(frozen=True, slots=True)
class Resized:
    """What was done."""

    preempted: int
    released_pages: int
    reason: str
    """Why it isn't the number that was asked for; empty if it is."""


class Resizes:
    """Those that were asked for, in order."""

    def __init__(self, clock: Clock, pages_max: int) -> None:
        self._clock = clock
        self._pages_max = pages_max
        self._asked: list[tuple[int, bool, asyncio.Future[Resized]]] = []

    def ask(self, pages: int, preempt: bool) -> "asyncio.Future[Resized]":
        """At the next boundary."""
        answer: asyncio.Future[Resized] = self._clock.future()
        self._asked.append((max(1, pages), preempt, answer))
        return answer

    def apply(self, core: "EngineCore") -> None:
        """At a boundary. Whoever asked and has gone meanwhile gets it all the same."""
        asked, self._asked = self._asked, []
        for pages, preempt, answer in asked:
            done = self._resize(core, pages, preempt)
            if not answer.done():
                answer.set_result(done)

    def _resize(self, core: "EngineCore", pages: int, preempt: bool) -> Resized:
        pool, reason = core.pool, ""
        floor = min(pool.capacity, max((request_pages(core, request) for request in core.requests), default=1))
        if pages > self._pages_max:
            reason = "the engine was started with no more room"
        elif pages < floor:
            reason = f"a request here may need {floor * core.parameters.page_size} tokens"
        wanted = min(max(pages, floor), self._pages_max)
        if wanted >= pool.capacity:
            pool.grow(wanted - pool.capacity)
            return Resized(0, 0, reason)
        missing, preempted = pool.capacity - wanted, 0
        while preempt and pool.free < missing and len(core.batch):
            core.preempt(core.batch.newest())
            preempted += 1
        released = min(missing, pool.free)
        pool.shrink(released)
        return Resized(preempted, released, reason if released == missing else "requests hold the rest")


def request_pages(core: "EngineCore", request: "SimRequest") -> int:
    """What a request may need in the end: the last token's KV is never computed."""
    generation = request.generation
    return core.parameters.pages_of(generation.prompt + generation.sampling.max_new_tokens - 1)
