"""One change of the layout at its worker: carries out what `table` says."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from meshift.backends.base import KvResized
from meshift.backends.layouts import LayoutCommitted, LayoutEnd, LayoutNow, LayoutRefused, ReconfigurableEngine
from meshift.schemas.layouts import LayoutRefusal, StageProgress
from meshift.schemas.reconfiguring import ChangeStatus, LayoutOrders, LayoutStep, WorkerPhase
from meshift.services.worker.layouts.context import LayoutContext
from meshift.services.worker.layouts.facts import change_of
from meshift.services.worker.layouts.table import ACCEPTED, FINAL, RESTING, ChangeEvent, next_phase
from meshift.services.worker.moves.wire import shortened

logger = logging.getLogger(__name__)

_P, _E = WorkerPhase, ChangeEvent

ResultT = TypeVar("ResultT")

EVENTS = {LayoutStep.RESIZE: _E.RESIZE, LayoutStep.COPY: _E.COPY, LayoutStep.COMMIT: _E.COMMIT}

DECIDED = FINAL | {_P.GROWING, _P.ABORTING, _P.RESTORING}
"""Where it is too late to give it up, or done already."""

AFTER_A_BUG = {
    _P.CLOSING: _E.REFUSED,
    _P.COMMITTING: _E.UNDECIDED,
    _P.ASKING: _E.UNDECIDED,
    _P.ABORTING: _E.UNDECIDED,
    _P.GROWING: _E.DONE,
    _P.RESTORING: _E.DONE,
}
"""What goes on where something fails that can't be undone any more, or isn't known; elsewhere it is undone."""

Failures = (TimeoutError, ConnectionError)
"""What an engine raises that doesn't answer: what was asked for may have been done."""


class Change:
    """From its begin until the instance is in one layout or the other, with the capacity that belongs to it."""

    def __init__(
        self, context: LayoutContext, engine: ReconfigurableEngine, change_id: str, orders: LayoutOrders, now: LayoutNow
    ) -> None:
        self._context = context
        self._engine = engine
        self._orders = orders
        self.change_id = change_id
        self.phase = _P.BEGINNING
        self.now = now
        """The newest that the engine said of its layout."""
        self._capacity_before = now.capacity
        self._begin_s = context.now_s()
        self._until_s = self._begin_s + orders.deadline_s
        self._leased_s = self._begin_s
        self._wanted: ChangeEvent | None = None
        self._called = asyncio.Event()
        self._resting = asyncio.Event()
        """It waits for an order, or has ended."""
        self._final = asyncio.Event()
        self._stages: tuple[StageProgress, ...] = ()
        self._scheduled = 0
        self._committed: LayoutCommitted | None = None
        self._moves_waited_ns = 0
        self._refusal: LayoutRefusal | None = None
        self._reason = ""
        self._effects: dict[WorkerPhase, Callable[[], Awaitable[ChangeEvent]]] = {
            _P.BEGINNING: self._begin,
            _P.RESIZING: self._resize,
            _P.STARTING: self._start,
            _P.CLOSING: self._close,
            _P.COMMITTING: self._commit,
            _P.ASKING: self._ask,
            _P.GROWING: self._grow,
            _P.ABORTING: self._abort,
            _P.RESTORING: self._restore,
        }

    async def run(self) -> None:
        """Until it has ended. Raises nothing but what is cancelled."""
        try:
            while self.phase not in FINAL:
                event = await (self._next_order() if self.phase in RESTING else self._next_event())
                self.phase = next_phase(self.phase, event)
        finally:
            self._context.gate.closed = False
            self._resting.set()
            self._final.set()
        self._count()

    # ---- what the coordinator says

    async def obey(self, step: LayoutStep) -> None:
        """Returns when the step is done, or can't be: `status` says. One that was obeyed before does nothing."""
        self.renew()
        await self._resting.wait()
        if ACCEPTED.get(self.phase) is step:
            self._refusal, self._reason = None, ""
            self._want(EVENTS[step])
            await self._resting.wait()

    async def undo(self, refusal: LayoutRefusal, reason: str) -> None:
        """Returns when it has ended, whichever way."""
        self.give_up(refusal, reason)
        await self._final.wait()

    def give_up(self, refusal: LayoutRefusal, reason: str) -> None:
        """It is to end, unless COMMIT is in the log."""
        if self.phase not in DECIDED and self._wanted is not _E.ABORT:
            self._note(refusal, reason)
            self._want(_E.ABORT)

    def renew(self) -> None:
        """Somebody asks for it."""
        self._leased_s = self._context.now_s()

    async def refresh(self) -> None:
        """Ask the engine how far it is."""
        if self.phase not in RESTING:
            return
        try:
            progress = await self._limited(self._engine.layout_progress(self.change_id))
        except (*Failures, LayoutRefused) as error:
            logger.debug("%s: no progress known: %s", self.change_id, error)
            return
        self._stages, self._scheduled = progress.stages, progress.scheduled_tokens
        if progress.failure:
            self.give_up(LayoutRefusal.BROKEN, progress.failure)

    def status(self) -> ChangeStatus:
        """As of now."""
        done = self._committed
        return ChangeStatus(
            change_id=self.change_id,
            phase=self.phase,
            orders=self._orders,
            capacity_before=self._capacity_before,
            left_s=self._until_s - self._context.now_s(),
            stages=self._stages,
            scheduled_tokens=self._scheduled,
            committed=None if done is None else done.commit,
            stop_ns=() if done is None else done.stop_ns,
            last_patch_tokens=0 if done is None else done.last_patch_tokens,
            last_patch_bytes=0 if done is None else done.last_patch_bytes,
            moves_waited_ns=self._moves_waited_ns,
            epoch=self.now.layout.epoch,
            refusal=self._refusal,
            reason=shortened(self._reason),
        )

    # ---- resting

    async def _next_order(self) -> ChangeEvent:
        options = self._context.options
        while self._wanted is None:
            self._resting.set()
            self._called.clear()
            try:
                async with asyncio.timeout(options.layout_look_s):
                    await self._called.wait()
            except TimeoutError:
                if await self._has_ended():
                    return _E.ENDED
            if self._context.now_s() - self._leased_s > options.layout_lease_s:
                self.give_up(LayoutRefusal.UNREACHABLE, "no coordinator has asked for it any more")
        event, self._wanted = self._wanted, None
        self._resting.clear()
        return event

    async def _has_ended(self) -> bool:
        """Whether the engine has undone it by itself."""
        end = await self._find_end()
        if end is None or end.committed:
            return False
        self._note(end.refusal or LayoutRefusal.DEADLINE, end.reason)
        self._resting.clear()
        return True

    def _want(self, event: ChangeEvent) -> None:
        self._wanted = event
        self._resting.clear()
        self._called.set()

    # ---- steps

    async def _next_event(self) -> ChangeEvent:
        try:
            return await self._effects[self.phase]()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if not isinstance(error, (*Failures, LayoutRefused)):
                logger.exception("%s: a bug while %s", self.change_id, self.phase)
            if self.phase in (_P.ASKING, _P.ABORTING):
                await asyncio.sleep(self._context.options.layout_retry_s)
            return self._failed(error)

    def _failed(self, error: Exception) -> ChangeEvent:
        refusal = error.refusal if isinstance(error, LayoutRefused) else LayoutRefusal.BROKEN
        self._note(refusal, str(error) or type(error).__name__)
        if self.phase is _P.BEGINNING and isinstance(error, LayoutRefused):
            return _E.REFUSED
        if self.phase in (_P.CLOSING, _P.ABORTING):
            self._context.gate.closed = False
        return AFTER_A_BUG.get(self.phase, _E.BROKEN)

    async def _begin(self) -> ChangeEvent:
        left_s = max(0.001, self._until_s - self._context.now_s())
        await self._limited(self._engine.begin_layout(change_of(self.change_id, self._orders, left_s)))
        return _E.DONE

    async def _resize(self) -> ChangeEvent:
        orders = self._orders
        if orders.capacity_during < self._context.load().capacity and not orders.flags.restart:
            done = await self._resized(orders.capacity_during)
            if done.capacity > orders.capacity_during:
                self._note(LayoutRefusal.NO_MEMORY, f"capacity stays at {done.capacity} tokens: {done.reason}")
                return _E.BROKEN
        return _E.DONE

    async def _start(self) -> ChangeEvent:
        flags = self._orders.flags
        if not (flags.no_async or flags.restart):
            await self._limited(self._engine.load_weights(self.change_id))
        if not (flags.no_patch or flags.restart):
            await self._limited(self._engine.start_kv_migration(self.change_id, self._orders.bytes_per_s))
        return _E.DONE

    async def _close(self) -> ChangeEvent:
        """No request may be between this instance and another one."""
        context, begin_s = self._context, self._context.now_s()
        context.gate.closed = True
        context.halt_moves()
        until_s = begin_s + context.options.layout_moves_wait_s
        while context.moves_under_way() and context.now_s() < until_s and self._wanted is None:  # noqa: ASYNC110 - of many
            await asyncio.sleep(context.options.layout_close_poll_s)
        self._moves_waited_ns += round((context.now_s() - begin_s) * 1e9)
        if self._wanted is _E.ABORT:
            return self._reopen(_E.ABORT)
        if context.moves_under_way():
            self._note(LayoutRefusal.BUSY, "requests are still moving")
            return self._reopen(_E.REFUSED)
        return _E.DONE

    async def _commit(self) -> ChangeEvent:
        timeout_s = self._context.options.layout_commit_timeout_s
        try:
            async with asyncio.timeout(timeout_s + self._context.options.layout_timeout_s):
                done = await self._engine.commit_layout(self.change_id, self._orders.commit, timeout_s)
        except LayoutRefused as error:
            self._note(error.refusal, str(error))
            retry = error.refusal in (LayoutRefusal.BUSY, LayoutRefusal.NOT_READY)
            return self._reopen(_E.REFUSED if retry else _E.BROKEN)
        self._committed = done
        return self._enter(done.now)

    async def _ask(self) -> ChangeEvent:
        """Until it is known."""
        await asyncio.sleep(self._context.options.layout_retry_s)
        end = await self._find_end()
        if end is None:
            return _E.UNDECIDED
        if end.committed:
            return self._enter(self.now)
        self._note(end.refusal or LayoutRefusal.BROKEN, end.reason)
        return self._reopen(_E.ENDED)

    async def _grow(self) -> ChangeEvent:
        await self._adjust(self._orders.capacity_after)
        return _E.DONE

    async def _abort(self) -> ChangeEvent:
        self._wanted = None
        self._context.gate.closed = False
        try:
            await self._limited(self._engine.abort_layout(self.change_id))
        except Failures as error:
            logger.warning("%s: not undone yet: %s", self.change_id, error)
            await asyncio.sleep(self._context.options.layout_retry_s)
            return _E.UNDECIDED
        end = await self._find_end()
        return _E.TOO_LATE if end is None or end.committed else _E.DONE

    async def _restore(self) -> ChangeEvent:
        await self._adjust(self._capacity_before)
        return _E.DONE

    # ---- pieces

    def _enter(self, now: LayoutNow) -> ChangeEvent:
        """The new layout is in force: for moves, too."""
        self._refusal, self._reason, self._wanted = None, "", None
        self._context.entered(now)
        self.now = now
        return self._reopen(_E.DONE)

    def _reopen(self, event: ChangeEvent) -> ChangeEvent:
        self._context.gate.closed = False
        return event

    async def _adjust(self, capacity: int) -> None:
        """Come as near to that capacity as can be. It isn't worth more than a try: an operator can do it again."""
        if self._orders.flags.no_resize or capacity == self._context.load().capacity:
            return
        try:
            done = await self._resized(capacity)
        except Failures as error:
            logger.warning("%s: capacity isn't %d tokens: %s", self.change_id, capacity, error)
            return
        if done.capacity != capacity:
            logger.info("%s: capacity is %d tokens, not %d: %s", self.change_id, done.capacity, capacity, done.reason)

    async def _resized(self, capacity: int) -> KvResized:
        return await self._limited(self._engine.resize_kv(capacity))

    async def _find_end(self) -> LayoutEnd | None:
        try:
            self.now = await self._limited(self._engine.layout())
        except Failures as error:
            logger.debug("%s: the engine doesn't tell its layout: %s", self.change_id, error)
            return None
        return next((end for end in self.now.ended if end.change_id == self.change_id), None)

    async def _limited(self, work: Awaitable[ResultT]) -> ResultT:
        async with asyncio.timeout(self._context.options.layout_timeout_s):
            return await work

    def _note(self, refusal: LayoutRefusal, reason: str) -> None:
        self._refusal, self._reason = refusal, reason

    def _count(self) -> None:
        counters = self._context.counters
        refusal = None if self._refusal is None else self._refusal.value
        counters.settled(self.phase.value, refusal)
        counters.byte_count += sum(stage.byte_count for stage in self._stages)
        counters.rounds += sum(stage.rounds for stage in self._stages)
        if self.phase is _P.COMMITTED:
            counters.durations.observe(self._context.now_s() - self._begin_s)
            if self._committed is not None:
                counters.stops.observe(max(self._committed.stop_ns, default=0) / 1e9)
