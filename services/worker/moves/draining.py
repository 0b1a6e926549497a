"""A drain moves away what it can: live, else as state only, to be computed elsewhere; the rest it waits for."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable
from typing import Protocol

from meshift.schemas.instances import DrainStatus
from meshift.schemas.moves import MoveMode, MoveOrder, MoveOutcome, MoveRefusal, MoveReport
from meshift.services.worker.moves.context import MoveContext
from meshift.services.worker.requests import RequestRecord

logger = logging.getLogger(__name__)

BUSY_TRIES = 4
"""How much sooner a request is tried again that was only being prefilled."""

DOUBLINGS_MAX = 3
"""How often the pause before a request's next try doubles: a mesh that has no room isn't asked all the time, and one
that gets room is noticed in time."""

MOVE_DEADLINE_S = 3_600.0
"""Of one move, where the drain has a later one."""


class Mover(Protocol):
    """What moves; `WorkerMoves` is one."""

    def begin(self, order: MoveOrder, *, fallback: bool = False) -> Awaitable[MoveReport]:
        """Begin; await the outcome."""

    def can_move(self, record: RequestRecord) -> bool:
        """Whether it would begin."""

    def running(self) -> int:
        """Moves under way."""


class Draining:
    """From the beginning of a drain on. `tick` does what can be done now."""

    def __init__(self, context: MoveContext, moves: Mover) -> None:
        self._context = context
        self._moves = moves
        self._moved = 0
        self._again_s: dict[str, float] = {}
        """When to try each request again."""
        self._tries: dict[str, int] = {}
        """That came to nothing."""
        self._refusals: dict[str, str] = {}
        """Why the newest try of each came to nothing."""
        self._tasks: dict[asyncio.Task[None], None] = {}

    def tick(self, now_s: float, until_s: float) -> None:
        """Once per report interval. Those that wait go first: they lose nothing by it."""
        if until_s <= now_s:
            return
        records = [record for record in self._context.requests if not record.over]
        self._forget({record.key.request_id for record in records})
        for record in sorted(records, key=lambda record: (record.end > record.base, record.known_tokens)):
            if self._again_s.get(record.key.request_id, 0.0) <= now_s and self._moves.can_move(record):
                self._begin(record, min(until_s - now_s, MOVE_DEADLINE_S))

    def status(self, left: int, deadline_s: float) -> DrainStatus:
        """For operators."""
        reasons = Counter(self._refusals.values()).most_common(1)
        return DrainStatus(
            left=left,
            moving=self._moves.running(),
            moved=self._moved,
            deadline_s=deadline_s,
            blocked=f"{reasons[0][1]} of {left} requests: {reasons[0][0]}" if reasons and left else "",
        )

    def stop(self) -> None:
        """The worker serves no more."""
        for task in list(self._tasks):
            task.cancel()

    def _begin(self, record: RequestRecord, deadline_s: float) -> None:
        order = MoveOrder(
            owner=self._context.owner,
            request_id=record.key.request_id,
            destination=None,
            mode=MoveMode.LIVE,
            deadline_s=deadline_s,
        )
        outcome = self._moves.begin(order, fallback=True)
        task = asyncio.get_running_loop().create_task(self._settle(outcome))
        self._tasks[task] = None
        task.add_done_callback(self._done)

    async def _settle(self, outcome: Awaitable[MoveReport]) -> None:
        report = await outcome
        request_id = report.request_id
        if report.outcome is MoveOutcome.MOVED:
            self._moved += 1
        elif report.outcome is not MoveOutcome.ENDED:
            self._again_s[request_id] = self._context.now_s() + self._pause_s(request_id, report.refusal)
            self._tries[request_id] = self._tries.get(request_id, 0) + 1
            self._refusals[request_id] = f"{report.refusal}: {report.reason}"

    def _pause_s(self, request_id: str, refusal: MoveRefusal | None) -> float:
        """Longer each time."""
        doublings = min(self._tries.get(request_id, 0), DOUBLINGS_MAX)
        sooner = BUSY_TRIES if refusal is MoveRefusal.BUSY else 1
        return float(self._context.options.drain_retry_s * 2**doublings / sooner)

    def _forget(self, present: set[str]) -> None:
        for known in (self._again_s, self._tries, self._refusals):
            for request_id in [request_id for request_id in known if request_id not in present]:
                del known[request_id]

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a drain's move failed", exc_info=task.exception())
