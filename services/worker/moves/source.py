"""The source's end of one move: carries out what `source_table` says. The decisions are in `decisions`."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

from meshift.backends.base import DeltaSent, FrozenRequest, MovableEngine, MoveRefused, Refusal, Reserved
from meshift.schemas.errors import InvalidRequest, MeshError, MessageTooLarge
from meshift.schemas.identity import Owner, RequestKey
from meshift.schemas.moves import FenceVerdict, MoveMode, MoveOrder, MoveOutcome, MoveRefusal, MoveReport
from meshift.services.worker.moves.context import MoveContext
from meshift.services.worker.moves.decisions import Progress
from meshift.services.worker.moves.peers import Room
from meshift.services.worker.moves.source_table import (
    DEADLINE_HOLDS,
    END_HOLDS,
    FINAL,
    SourceEvent,
    SourceState,
    next_state,
)
from meshift.services.worker.moves.tally import Tally
from meshift.services.worker.moves.traces import MoveTrace
from meshift.services.worker.moves.wire import move_key, refusal_of, refusal_of_error, shortened, unpack_room
from meshift.services.worker.requests import RequestRecord

logger = logging.getLogger(__name__)

_S, _E = SourceState, SourceEvent

OUTCOMES = {
    _S.MOVED: MoveOutcome.MOVED,
    _S.STAYED: MoveOutcome.STAYED,
    _S.ENDED: MoveOutcome.ENDED,
    _S.REFUSED: MoveOutcome.REFUSED,
}


class SourceMove:
    """One move. `fallback`: where KV finds no room or no way, it goes as state only, to be computed there."""

    def __init__(
        self, context: MoveContext, engine: MovableEngine, record: RequestRecord, order: MoveOrder, *, fallback: bool
    ) -> None:
        self._context = context
        self._engine = engine
        self._record = record
        self._destination = order.destination
        self._fallback = fallback
        self._progress = Progress(order.mode)
        self._until_s = context.now_s() + order.deadline_s
        self._tokens: tuple[int, ...] = ()
        self._reserved: Reserved | None = None
        self._frozen: FrozenRequest | None = None
        self._epochs: tuple[int, int | None] = (context.gate.epoch, None)
        """Of the source's layout and, once it is told, of the destination's."""
        self._contacted = False
        """The destination may hold something of this move."""
        self._attempt = record.key.attempt
        """The one in which it goes on here, if it does."""
        self._tally = Tally(context.now_s())
        self._trace = MoveTrace.begin(context.tracer, record, context.owner, order.mode)
        self.state = _S.CHOOSING
        self._effects: dict[SourceState, Callable[[], Awaitable[SourceEvent]]] = {
            _S.CHOOSING: self._choose,
            _S.RAISING: self._ask_frontend,
            _S.REKEYING: self._rekey,
            _S.BEGINNING: self._begin,
            _S.RESERVING: self._reserve,
            _S.COPYING: self._copy,
            _S.RESTARTING: self._restart,
            _S.FREEZING: self._freeze,
            _S.COMMITTING: self._commit,
            _S.ASKING: self._ask,
            _S.FENCING: self._ask_frontend,
            _S.RELEASING: self._release,
            _S.RESUMING: self._resume,
        }

    async def run(self) -> MoveReport:
        """Until the owner is certain. Raises nothing but what is cancelled."""
        self._record.moving = True
        try:
            while self.state not in FINAL:
                self._take(self._interrupted() or await self._next_event())
        except Exception as error:
            self._fail(error)
        finally:
            self._record.moving = self._record.fencing = False
            report = self.report()
            self._trace.end(report)
        self._context.counters.settled(report.mode, OUTCOMES[self.state], report.refusal, report.figures)
        return report

    def report(self) -> MoveReport:
        """As of now."""
        request_id, attempt, hop = self._record.key
        bare = self._frozen is not None and not self._progress.with_kv
        return MoveReport(
            request_id=request_id,
            attempt=attempt,
            hop=hop + 1,
            source=self._context.owner,
            destination=self._destination,
            mode=MoveMode.RECOMPUTE if bare else self._progress.mode,
            phase=self.state.value,
            outcome=OUTCOMES.get(self.state),
            refusal=self._tally.refusal,
            reason=shortened(self._tally.reason),
            figures=self._tally.figures(self._context.now_s()),
        )

    @property
    def _key(self) -> RequestKey:
        """What the request is to be called at the destination."""
        return self._record.key._replace(hop=self._record.key.hop + 1)

    @property
    def _there(self) -> Owner:
        assert self._destination is not None, "chosen first"
        return self._destination

    @property
    def _computed(self) -> int:
        """Tokens with KV, as far as is known: the newest one's is computed by the next step."""
        held = self._engine.held_tokens(self._record.key) or 0
        return max(held, self._record.known_tokens - 1, len(self._tokens))

    def _take(self, event: SourceEvent) -> None:
        self.state = next_state(self.state, event)

    def _interrupted(self) -> SourceEvent | None:
        if self._record.over and self.state in END_HOLDS:
            return self._over()
        if self._context.now_s() >= self._until_s and self.state in DEADLINE_HOLDS:
            return self._refuse(MoveRefusal.DEADLINE, f"the move's deadline came while {self.state}")
        if self.state in DEADLINE_HOLDS and self._context.gate.bars(self._epochs[0]):
            return self._refuse(MoveRefusal.RETRY, "the layout of its instance changes")
        return None

    async def _next_event(self) -> SourceEvent:
        try:
            with self._trace.step(self.state):
                return await self._effects[self.state]()
        except Exception as error:
            logger.exception("the move of %s failed while %s", self._record.key, self.state)
            self._tally.note(MoveRefusal.BROKEN, f"{type(error).__name__}: {error}")
            if self.state in DEADLINE_HOLDS:
                return _E.REFUSED
            if self.state in (_S.COMMITTING, _S.ASKING, _S.FENCING, _S.RAISING):
                await asyncio.sleep(self._context.options.move_retry_s)
                return _E.NO_ANSWER
            raise

    def _fail(self, error: Exception) -> None:
        """A bug. Rather than leave the request stopped for ever it is given up here: its frontend goes on elsewhere."""
        logger.error("the move of %s can't go on, so that it is given up here", self._record.key, exc_info=error)
        self._tally.note(MoveRefusal.BROKEN, f"{type(error).__name__}: {error}")
        self.state = _S.ENDED
        if self._destination is not None:
            self._context.peers.abort(self._key, self._destination, "the source failed")
        self._context.close(self._record.key)

    # ---- before the commit

    async def _choose(self) -> SourceEvent:
        if self._destination is None:
            tried = self._record.tried
            chosen = await self._context.destinations.choose(self._record, tried)
            if chosen is None and tried:
                chosen = await self._context.destinations.choose(self._record, ())
            if chosen is None:
                return self._decline(MoveRefusal.NO_DESTINATION, "no instance can take it now")
            self._destination = chosen
        if self._destination.instance_id == self._context.owner.instance_id:
            return self._decline(MoveRefusal.INCOMPATIBLE, "it is there already")
        return _E.TRIED if self._destination in self._record.tried else _E.CHOSEN

    async def _rekey(self) -> SourceEvent:
        return await self._go_on_here()

    async def _begin(self) -> SourceEvent:
        try:
            async with self._deadline():
                begun = await self._engine.begin_move(move_key(self._key))
        except (MoveRefused, TimeoutError) as error:
            return self._refused(error)
        self._tokens = begun.tokens
        self._progress.begin(bool(begun.tokens))
        return _E.BEGUN

    async def _restart(self) -> SourceEvent:
        self._progress.restarts += 1
        if self._progress.restarts > self._context.rules.restarts_max:
            return self._refuse(MoveRefusal.PREEMPTED, f"preempted {self._progress.restarts} times")
        await self._engine.resume(move_key(self._key), self._record.key.attempt)
        return await self._begin()

    async def _reserve(self) -> SourceEvent:
        progress, rules = self._progress, self._context.rules
        computed = self._computed
        known = max(self._record.known_tokens, computed + 1)
        growth_left = self._record.prompt_tokens + self._record.sampling.max_new_tokens - known
        room = self._room(progress.slots_wanted(computed, growth_left, rules))
        held, self._contacted = self._contacted, True
        try:
            reply = await self._context.peers.reserve(self._key, self._there, self._context.layout, room)
        except MeshError as error:
            return self._refuse(refusal_of_error(error), f"{self._destination} gives no room: {error}")
        if reply.room is None:
            self._contacted = held
            assert reply.refusal is not None
            return self._without_kv(reply.refusal, f"{self._destination}: {reply.reason}")
        self._reserved = unpack_room(reply.room)
        self._epochs = (self._epochs[0], reply.room.epoch)
        progress.sent = max(progress.sent, min(self._reserved.cached, computed))
        return _E.ROOM_TO_FREEZE if progress.is_last(computed, rules) else _E.ROOM_TO_COPY

    async def _copy(self) -> SourceEvent:
        assert self._reserved is not None
        try:
            async with self._renewed(), self._deadline():
                delta = await self._engine.send_delta(move_key(self._key), self._progress.sent, self._reserved)
        except (MoveRefused, TimeoutError) as error:
            return self._refused(error)
        self._count_round(delta)
        self._progress.round_sent(delta.end, self._computed)
        return _E.COPIED

    async def _freeze(self) -> SourceEvent:
        reserved = self._reserved if self._progress.with_kv else None
        try:
            async with self._renewed(), self._freeze_deadline():
                frozen = await self._engine.freeze(move_key(self._key), self._progress.sent, reserved)
        except (MoveRefused, TimeoutError) as error:
            return self._refused(error)
        self._frozen = frozen
        if frozen.delta is not None:
            self._count_round(frozen.delta)
        return _E.FROZEN

    # ---- the commit, and who owns it

    async def _commit(self) -> SourceEvent:
        frozen, record = self._frozen, self._record
        assert frozen is not None
        if record.over:
            self._over()
            return _E.NOT_COMMITTED
        assert len(frozen.output) == record.end, f"{record.key}: {len(frozen.output)} tokens, not {record.end}"
        lease_s = self._context.leases.left_s(record.frontend, self._context.now_s())
        try:
            with self._trace.of_request():
                epoch = self._epochs[1] or 0
                reply = await self._context.peers.commit(record, self._key, self._there, frozen, lease_s, epoch)
        except (MessageTooLarge, InvalidRequest) as error:
            # It wasn't sent, or can't be understood: nobody has committed anything.
            self._tally.note(MoveRefusal.INCOMPATIBLE, str(error))
            return _E.NOT_COMMITTED
        except MeshError as error:
            self._tally.note(refusal_of_error(error), f"no answer to the commit: {error}")
            return _E.NO_ANSWER
        if reply.refusal is not None:
            self._tally.note(reply.refusal, f"{self._destination}: {reply.reason}")
            return _E.NOT_COMMITTED
        return self._committed(reply.runnable_ns)

    async def _ask(self) -> SourceEvent:
        try:
            answer = await self._context.peers.question(self._key, self._there)
        except MeshError as error:
            self._tally.note(refusal_of_error(error), f"no answer whether it was committed: {error}")
            return _E.NO_ANSWER
        return self._committed(answer.runnable_ns) if answer.committed else _E.NOT_COMMITTED

    async def _ask_frontend(self) -> SourceEvent:
        self._record.fencing = True
        try:
            reply = await self._context.peers.fence(self._key, self._there, self._record.frontend)
        except MeshError as error:
            self._tally.note(refusal_of_error(error), f"its frontend doesn't answer: {error}")
            await asyncio.sleep(self._context.options.move_retry_s)
            return _E.NO_ANSWER
        self._record.fencing = False
        if reply.verdict is FenceVerdict.RAISED:
            self._attempt = reply.attempt
            return _E.RAISED
        if reply.verdict is FenceVerdict.MOVED and self.state is _S.FENCING:
            return self._committed(0)
        self._context.close(self._record.key)
        return self._over(MoveRefusal.STALE)

    def _committed(self, runnable_ns: int) -> SourceEvent:
        assert self._frozen is not None
        # What is to be computed there isn't runnable yet.
        self._tally.committed(self._frozen.frozen_ns, runnable_ns if self._frozen.computed else 0)
        return _E.COMMITTED

    # ---- the end

    async def _release(self) -> SourceEvent:
        context, record = self._context, self._record
        over = record.over
        if over:
            # Whoever ended it meanwhile meant all of it.
            context.peers.abort(self._key, self._there, "over")
        else:
            context.requests.leave(record, context.now_s())
            context.moved.add(record, self._there, context.now_s())
            if record.trace is not None:
                record.trace.moved(self._there)
        await self._engine.release(move_key(self._key))
        return self._over() if over else _E.RELEASED

    async def _resume(self) -> SourceEvent:
        if self._contacted:
            self._context.peers.abort(self._key, self._there, self._tally.reason)
            self._record.tried.add(self._there)
        return await self._go_on_here()

    async def _go_on_here(self) -> SourceEvent:
        """The engine goes on with it, under the attempt that the frontend knows."""
        context, record, old = self._context, self._record, self._record.key
        name = move_key(self._key)
        if self._attempt != old.attempt and not record.over:
            record.tried.clear()
            context.requests.rekey(record, self._attempt)
        await self._engine.resume(name, record.key.attempt)
        context.requests.forget_former(old)
        if record.over:
            # A cancel that came meanwhile may have borne a key that the engine didn't know yet, or no longer.
            self._engine.cancel(old)
            self._engine.cancel(record.key)
            return self._over()
        return _E.RESUMED

    # ---- pieces

    def _room(self, slots: int) -> Room:
        schema = None if self._contacted else self._record.sampling.json_schema
        return Room(self._tokens if slots else (), slots, self._epochs[1], schema)

    def _renewed(self) -> AbstractAsyncContextManager[None]:
        slots = self._reserved.slots if self._reserved is not None and self._progress.with_kv else 0
        return self._context.peers.renewing(self._key, self._there, self._context.layout, self._room(slots))

    def _deadline(self) -> "asyncio.Timeout":
        return asyncio.timeout(max(0.0, self._until_s - self._context.now_s()))

    def _freeze_deadline(self) -> "asyncio.Timeout":
        """A client waits meanwhile: only who asked for a blocking copy has it wait for long."""
        if self._progress.mode is MoveMode.BLOCKING:
            return self._deadline()
        until_s = self._context.now_s() + self._context.options.move_freeze_timeout_s
        return asyncio.timeout_at(min(until_s, self._until_s))

    def _refused(self, error: MoveRefused | TimeoutError) -> SourceEvent:
        """By the engine."""
        if isinstance(error, TimeoutError):
            return self._refuse(MoveRefusal.DEADLINE, f"the move's deadline came while {self.state}")
        if self._record.over:
            return self._over()
        freezing = self.state is _S.FREEZING
        if error.refusal is Refusal.PREEMPTED and (freezing or self.state is _S.COPYING):
            return _E.PREEMPTED
        if error.refusal is Refusal.NO_ROOM and freezing:
            self._progress.outgrown += 1
            if self._progress.outgrown <= self._context.rules.outgrown_max:
                return _E.OUTGROWN
        if freezing or self.state is _S.COPYING:
            return self._without_kv(refusal_of(error.refusal), str(error))
        give_up = self._decline if self.state is _S.BEGINNING else self._refuse
        return give_up(refusal_of(error.refusal), str(error))

    def _without_kv(self, refusal: MoveRefusal, reason: str) -> SourceEvent:
        """If it may go without its KV, and the reason is one of its KV, it does."""
        if self._fallback and self._progress.with_kv and refusal in (MoveRefusal.NO_ROOM, MoveRefusal.BROKEN):
            self._tally.note(refusal, reason)
            self._progress.with_kv = False
            return _E.NO_KV
        return self._refuse(refusal, reason)

    def _refuse(self, refusal: MoveRefusal, reason: str) -> SourceEvent:
        self._tally.note(refusal, reason)
        return _E.REFUSED

    def _decline(self, refusal: MoveRefusal, reason: str) -> SourceEvent:
        self._tally.note(refusal, reason)
        return _E.DECLINED

    def _over(self, refusal: MoveRefusal = MoveRefusal.ENDED) -> SourceEvent:
        self._tally.note(refusal, "it is over")
        return _E.OVER

    def _count_round(self, delta: DeltaSent) -> None:
        self._trace.round(delta)
        self._tally.round(delta)
