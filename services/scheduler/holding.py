"""Dispatches that wait for room: each is a frontend's unanswered question, so nothing is lost with the scheduler."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from meshift.schemas.instances import DispatchRequest
from meshift.services.scheduler.policy.demand import HeldDemand
from meshift.services.scheduler.policy.dispatch import DispatchDecision
from meshift.services.scheduler.policy.waiting import WaitingLine

HELD_MAX = 512
"""Questions that wait at once; the last of the line is told to ask again. Below what an endpoint may have at work."""
ASK_AGAIN_S = 0.05
"""When one whose time at the line is over shall ask again."""
CROWD_ASKS_PER_S = 500.0
CROWD_ASK_AGAIN_S, CROWD_ASK_AGAIN_S_MAX = 0.25, 10.0
"""Those for whom the line is too short get turns to ask again, so many a second, each after a time between these: so
answering some thousand of them costs no more than answering a few."""

Decide = Callable[[DispatchRequest], DispatchDecision]


@dataclass(slots=True)
class _Held:
    request: DispatchRequest
    decided: "asyncio.Future[DispatchDecision | float]"


class Holding:
    """The line. `decide` raises MeshError if there is nobody to take a request."""

    def __init__(self, decide: Decide) -> None:
        self._decide = decide
        self._line: WaitingLine[_Held] = WaitingLine()
        self._crowd_s = 0.0
        """The last turn that was given to one for whom the line is too short."""

    def __len__(self) -> int:
        return len(self._line)

    def demand(self, model: str) -> HeldDemand:
        """What waits for that model's instances."""
        demands = [place.item.request.demand for place in self._line if place.item.request.model == model]
        return HeldDemand(sum(demands), max(demands, default=0))

    async def wait(self, request: DispatchRequest, now_s: float, timeout_s: float) -> DispatchDecision | float:
        """Until it has a place. When the time is over, or others that come first need the space: in how many seconds
        to ask again."""
        loop = asyncio.get_running_loop()
        held = _Held(request, loop.create_future())
        place = self._line.add(held, request.priority.scheduling, now_s - request.waited_s)
        self._limit(now_s)
        timer = loop.call_later(timeout_s, _give_up, held)
        try:
            return await held.decided
        finally:
            timer.cancel()
            self._line.remove(place)

    def pump(self) -> None:
        """The instances have changed: place who now has room, in order. One that finds none may be passed by others
        with smaller prompts, but not at the instance where it would be next: its turn has come when it waits there."""
        smallest_refused: dict[str, int] = {}
        for place in list(self._line):
            request = place.item.request
            # Placing others only takes room away: where a smaller prompt of this round found none, a larger won't.
            if request.demand < smallest_refused.get(request.model, request.demand + 1) and not self._place(place.item):
                smallest_refused[request.model] = request.demand

    def _place(self, held: _Held) -> bool:
        """Whether it (or any other that excludes no owner) could have been placed."""
        if held.decided.done():
            return True
        try:
            decision = self._decide(held.request)
        except Exception as error:
            held.decided.set_exception(error)
            return True
        if decision.owner is not None:
            held.decided.set_result(decision)
        return decision.owner is not None or bool(held.request.excluded)

    def release(self) -> None:
        """Tell all to ask again: the scheduler stops."""
        for place in list(self._line):
            _give_up(place.item)

    def _limit(self, now_s: float) -> None:
        if len(self._line) > HELD_MAX:
            last = self._line.last()
            turn_s = max(self._crowd_s, now_s + CROWD_ASK_AGAIN_S) + 1 / CROWD_ASKS_PER_S
            self._crowd_s = min(turn_s, now_s + CROWD_ASK_AGAIN_S_MAX)
            _give_up(last.item, self._crowd_s - now_s)
            self._line.remove(last)


def _give_up(held: _Held, ask_again_s: float = ASK_AGAIN_S) -> None:
    if not held.decided.done():
        held.decided.set_result(ask_again_s)
