"""All moves of one worker, out of it and into it, and their place on the bus."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable

from meshift.schemas import subjects
from meshift.schemas.errors import Stale
from meshift.schemas.identity import RequestKey
from meshift.schemas.limits import MOVES_LISTED_MAX
from meshift.schemas.moves import (
    MoveAbort,
    MoveClosed,
    MoveCommit,
    MoveFigures,
    MoveOrder,
    MoveOutcome,
    MoveQuestion,
    MoveRefusal,
    MoveReport,
    MoveReserve,
    MovesReply,
    MovesRequest,
)
from meshift.services.bus.base import Bus, Subscription
from meshift.services.worker.moves.context import MoveContext
from meshift.services.worker.moves.counters import MoveCounters
from meshift.services.worker.moves.destination import IncomingMoves
from meshift.services.worker.moves.draining import Draining
from meshift.services.worker.moves.moved import Moved
from meshift.services.worker.moves.source import SourceMove
from meshift.services.worker.requests import RequestRecord


class WorkerMoves:
    """See `base.Moves`."""

    def __init__(self, context: MoveContext) -> None:
        self._context = context
        self._incoming = IncomingMoves(context)
        self._running: dict[asyncio.Task[MoveReport], SourceMove] = {}
        self.draining = Draining(context, self)
        self._ended: deque[MoveReport] = deque(maxlen=MOVES_LISTED_MAX)

    @property
    def counters(self) -> MoveCounters:
        """Live counters."""
        return self._context.counters

    def serve(self, bus: Bus) -> list[Subscription]:
        """Take part on the bus."""
        name = self._context.owner.instance_id
        incoming = self._incoming
        return [
            bus.serve("move", subjects.worker_move(name), MoveOrder, self._on_order),
            bus.serve("moves", subjects.worker_moves(name), MovesRequest, lambda _: self.describe()),
            bus.serve("move-reserve", subjects.worker_move_reserve(name), MoveReserve, incoming.on_reserve),
            bus.serve("move-commit", subjects.worker_move_commit(name), MoveCommit, incoming.on_commit),
            bus.serve("move-question", subjects.worker_move_question(name), MoveQuestion, incoming.on_question),
            bus.subscribe(subjects.worker_move_abort(name), MoveAbort, incoming.on_abort),
            bus.subscribe(subjects.worker_move_closed(name), MoveClosed, self._on_closed),
        ]

    # ---- base.Moves

    def begin(self, order: MoveOrder, *, fallback: bool = False) -> "asyncio.Future[MoveReport]":
        """See `base.Moves`. `fallback`: where KV finds no room or no way, the request goes as state only."""
        record = self._context.requests.find(order.request_id)
        objection = self._objection(record)
        if objection is not None:
            return _ready(self._refused(order, record, *objection))
        engine = self._context.movable
        assert engine is not None
        assert record is not None
        move = SourceMove(self._context, engine, record, order, fallback=fallback)
        # At once, not only when the task first runs: the next order must find it moving.
        record.moving = True
        task = asyncio.get_running_loop().create_task(move.run())
        self._running[task] = move
        task.add_done_callback(self._done)
        return asyncio.shield(task)

    def can_move(self, record: RequestRecord) -> bool:
        """See `base.Moves`."""
        return self._objection(record) is None

    def describe(self) -> MovesReply:
        """See `base.Moves`."""
        return MovesReply(
            owner=self._context.owner,
            running=tuple(move.report() for move in list(self._running.values())[:MOVES_LISTED_MAX]),
            ended=tuple(self._ended),
            incoming=len(self._incoming),
        )

    # ---- for the worker

    def running(self) -> int:
        """Moves out that are under way."""
        return len(self._running)

    def incoming(self) -> int:
        """Moves into it that are under way."""
        return len(self._incoming)

    def halt(self) -> None:
        """The layout is about to change: those out stay where they are unless they are frozen already, of those in
        what isn't being committed is given up."""
        self._incoming.halt()

    def under_way(self) -> int:
        """Moves that the engine takes part in."""
        return len(self._running) + self._incoming.under_way()

    def moved(self, key: RequestKey) -> Moved | None:
        """Where the request went that was here under that key."""
        return self._context.moved.get(key)

    def cancelled(self, key: RequestKey) -> Moved | None:
        """Where a cancel of that key must go on to."""
        return self._context.moved.cancelled(key)

    def closed(self, record: RequestRecord) -> None:
        """A record is over here: whoever moved it here may forget it."""
        if record.came_from is not None:
            self._context.peers.closed(record.key, record.came_from)

    def refuse(self) -> None:
        """Take nothing more in."""
        self._incoming.refuse()

    def tick(self, now_s: float) -> None:
        """Once per report interval."""
        self._incoming.expire(now_s)
        self._context.moved.expire(now_s)

    def stop(self) -> None:
        """The worker serves no more: what was under way is decided by the others."""
        self._incoming.stop()
        self.draining.stop()
        self._context.destinations.stop()
        for task in list(self._running):
            task.cancel()

    # ---- inside

    def _objection(self, record: RequestRecord | None) -> tuple[MoveRefusal, str] | None:
        context = self._context
        if record is None:
            return MoveRefusal.UNKNOWN, "no such request here"
        if context.movable is None:
            return MoveRefusal.INCOMPATIBLE, f"requests of a {context.info.name} engine don't move"
        if record.over:
            return MoveRefusal.ENDED, "it has ended"
        if record.moving:
            return MoveRefusal.BUSY, "it moves already"
        if context.gate.closed:
            return MoveRefusal.RETRY, f"the layout of {context.owner} changes"
        if len(self._running) >= context.options.moves_out_max:
            return MoveRefusal.BUSY, f"{len(self._running)} requests move away already"
        return None

    def _refused(self, order: MoveOrder, record: RequestRecord | None, refusal: MoveRefusal, reason: str) -> MoveReport:
        _, attempt, hop = record.key if record is not None else (order.request_id, 0, 0)
        report = MoveReport(
            request_id=order.request_id,
            attempt=attempt,
            hop=hop + 1,
            source=self._context.owner,
            destination=order.destination,
            mode=order.mode,
            phase="refused",
            outcome=MoveOutcome.REFUSED,
            refusal=refusal,
            reason=reason,
        )
        self._context.counters.settled(order.mode, MoveOutcome.REFUSED, refusal, MoveFigures())
        return report

    def _on_order(self, order: MoveOrder) -> MoveReport | Awaitable[MoveReport]:
        if order.owner != self._context.owner:
            raise Stale(f"this is {self._context.owner}, not {order.owner}")
        ending = self.begin(order)
        if order.wait or ending.done():
            return ending
        return next(move.report() for move in reversed(self._running.values()))

    def _on_closed(self, closed: MoveClosed) -> None:
        if closed.owner == self._context.owner:
            for key in closed.keys:
                record = self._context.moved.over(key, closed.destination)
                if record is not None:
                    # Whoever moved it here remembers that, too.
                    self.closed(record)

    def _done(self, task: "asyncio.Task[MoveReport]") -> None:
        del self._running[task]
        with contextlib.suppress(asyncio.CancelledError):
            self._ended.append(task.result())


def _ready(report: MoveReport) -> "asyncio.Future[MoveReport]":
    future: asyncio.Future[MoveReport] = asyncio.get_running_loop().create_future()
    future.set_result(report)
    return future
