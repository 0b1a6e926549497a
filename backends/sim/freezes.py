"""Requests that are to leave the batch for the end of their move, and who waits for it."""

import asyncio
from collections.abc import Callable

from meshift.backends.sim.clock import Clock
from meshift.backends.sim.lifecycle import RequestEvent, RequestState
from meshift.backends.sim.request import SimRequest


class Freezes:
    """Applied at a step boundary; told when the tokens up to it are on their way to the listener."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._asked: list[SimRequest] = []

    def ask(self, request: SimRequest) -> "asyncio.Future[bool]":
        """Whether it is frozen, when that is known."""
        waiter = request.freeze_waiter = self._clock.future()
        self._asked.append(request)
        return waiter

    def apply_waiting(self, request: SimRequest) -> None:
        """One that was taken out of the queue: nothing has to end first."""
        self._asked.remove(request)
        request.enter(RequestEvent.FREEZE)
        self._answer(request)

    def apply(self, leave_batch: Callable[[SimRequest], None], progress: Callable[[SimRequest, int], None]) -> None:
        """At a boundary."""
        for request in self._asked:
            waiter = request.freeze_waiter
            if request.state is RequestState.RUNNING and waiter is not None and not waiter.done():
                leave_batch(request)
                progress(request, request.generated)
                request.enter(RequestEvent.FREEZE)

    def tell(self) -> None:
        """After the delivery of that boundary's tokens."""
        asked, self._asked = self._asked, []
        for request in asked:
            self._answer(request)

    @staticmethod
    def _answer(request: SimRequest) -> None:
        waiter, request.freeze_waiter = request.freeze_waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(request.state is RequestState.FROZEN)
