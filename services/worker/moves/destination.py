"""The destination's end of moves: carries out what `destination_table` says."""

import asyncio
import logging
from collections.abc import Coroutine

from meshift.backends.base import Committed, EngineRequest, FrozenRequest, MovableEngine, MoveRefused
from meshift.schemas.base import count_tokens, unpack_tokens
from meshift.schemas.errors import Stale
from meshift.schemas.identity import Owner, RequestKey
from meshift.schemas.logprobs import Logprobs, unpack_logprobs
from meshift.schemas.moves import (
    MoveAbort,
    MoveAnswer,
    MoveCommit,
    MoveCommitReply,
    MoveQuestion,
    MoveRefusal,
    MoveReserve,
    MoveReserveReply,
)
from meshift.services.worker import traces
from meshift.services.worker.moves.context import MoveContext
from meshift.services.worker.moves.destination_table import FINAL, DestinationEvent, DestinationState, next_state
from meshift.services.worker.moves.wire import move_key, pack_room, refusal_of, shortened, unpack_layout
from meshift.services.worker.requests import RequestRecord

logger = logging.getLogger(__name__)

_S, _E = DestinationState, DestinationEvent

ENGINE_MARGIN_S = 0.25
"""How much longer than it was told the engine may take to commit."""

LEARN_SHARE = 0.5
"""Of the time that the source waits for an answer to its reservation: for its schema to be compiled."""

TOMBSTONES_MAX = 100_000
"""Ended moves remembered at most; the oldest go first."""


class Incoming:
    """What is known of one move."""

    def __init__(self, key: RequestKey, source: Owner) -> None:
        self.key = key
        self.source = source
        self.state = _S.NEW
        self.turn = asyncio.Lock()
        """The engine is asked for room once at a time: a repeated message waits."""
        self.decided: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Set when it is committed or aborted."""
        self.deadline: asyncio.TimerHandle | None = None
        self.until_s = 0.0
        """When its tombstone may go."""
        self.runnable_ns = 0
        self.refusal: MoveRefusal | None = None
        self.reason = ""
        """Why it was aborted."""
        self.unwanted = False
        """The source aborted it while the engine committed it."""

    def take(self, event: DestinationEvent) -> DestinationState:
        """The new state."""
        self.state = next_state(self.state, event)
        return self.state


class IncomingMoves:
    """All moves into one worker."""

    def __init__(self, context: MoveContext) -> None:
        self._context = context
        self._moves: dict[RequestKey, Incoming] = {}
        self._ended: dict[RequestKey, Incoming] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._open = True

    def __len__(self) -> int:
        return len(self._moves)

    def refuse(self) -> None:
        """Take nothing more, and give the reservations up: the worker drains."""
        self._open = False
        for incoming in list(self._moves.values()):
            if incoming.state in (_S.RESERVING, _S.RESERVED):
                self._abort(incoming, _E.ABORT, MoveRefusal.DRAINING, "it drains")

    def halt(self) -> None:
        """Give up what isn't being committed yet: the layout is about to change."""
        for incoming in list(self._moves.values()):
            if incoming.state in (_S.RESERVING, _S.RESERVED):
                self._abort(incoming, _E.ABORT, MoveRefusal.RETRY, "the layout changes")

    def under_way(self) -> int:
        """Moves that the engine may still hold something of."""
        return len(self._moves) + len(self._tasks)

    def stop(self) -> None:
        """The worker serves no more; the engine's end frees what is reserved."""
        for incoming in self._moves.values():
            if incoming.deadline is not None:
                incoming.deadline.cancel()
        for task in list(self._tasks):
            task.cancel()

    def expire(self, now_s: float) -> None:
        """Forget old tombstones. They were made in order of time, so it stops at the first young one."""
        while self._ended:
            oldest = next(iter(self._ended))
            if self._ended[oldest].until_s > now_s:
                return
            del self._ended[oldest]

    # ---- messages

    async def on_reserve(self, message: MoveReserve) -> MoveReserveReply:
        """An endpoint."""
        self._check_owner(message.owner)
        objection = self._objection(message)
        if objection is None and message.json_schema is not None:
            # Before anything is promised: whoever is refused now may ask again, and nothing was given up.
            objection = await self._learn(message.json_schema) or self._objection(message)
        if objection is None:
            incoming = self._find(message.destination_key, message.source)
            async with incoming.turn:
                return await self._reserve(incoming, message)
        return self._no_room(*objection)

    async def on_commit(self, message: MoveCommit) -> MoveCommitReply:
        """An endpoint."""
        self._check_owner(message.owner)
        incoming = self._find(message.destination_key, message.source)
        if incoming.state is _S.RESERVED:
            await self._commit(incoming, message)
        elif incoming.state is _S.COMMITTING:
            await asyncio.shield(incoming.decided)
        else:
            self._abort(incoming, _E.COMMIT, MoveRefusal.UNKNOWN, "there is no reservation for it")
        return MoveCommitReply(
            owner=self._context.owner,
            refusal=None if incoming.state is _S.COMMITTED else incoming.refusal,
            reason=shortened(incoming.reason),
            runnable_ns=incoming.runnable_ns,
        )

    async def on_question(self, message: MoveQuestion) -> MoveAnswer:
        """An endpoint. What isn't committed by now never will be."""
        self._check_owner(message.owner)
        incoming = self._find(message.destination_key, message.source)
        self._abort(incoming, _E.QUESTION, MoveRefusal.UNKNOWN, "its source asked before it was committed")
        if incoming.state is _S.COMMITTING:
            await asyncio.shield(incoming.decided)
        committed = incoming.state is _S.COMMITTED
        return MoveAnswer(owner=self._context.owner, committed=committed, runnable_ns=incoming.runnable_ns)

    def on_abort(self, message: MoveAbort) -> None:
        """A subscription."""
        if message.owner != self._context.owner:
            return
        incoming = self._find(message.destination_key, message.source)
        self._abort(incoming, _E.ABORT, MoveRefusal.UNKNOWN, message.reason)
        if incoming.state is _S.COMMITTING:
            incoming.unwanted = True
        elif incoming.state is _S.COMMITTED:
            self._context.close(incoming.key)

    # ---- reserving

    def _objection(self, message: MoveReserve) -> tuple[MoveRefusal, str] | None:
        context, key = self._context, message.destination_key
        if context.movable is None:
            return MoveRefusal.INCOMPATIBLE, f"requests of a {context.info.name} engine don't move"
        if not self._open:
            return MoveRefusal.DRAINING, f"{context.owner} drains"
        if context.gate.bars(context.gate.epoch if message.epoch is None else message.epoch):
            return MoveRefusal.RETRY, f"the layout of {context.owner} changes"
        if key in self._moves or key in self._ended:
            return None
        if len(self._moves) >= context.options.moves_in_max:
            return MoveRefusal.BUSY, f"{len(self._moves)} requests move here already"
        if len(context.requests) >= context.options.requests_max:
            return MoveRefusal.BUSY, f"{context.owner} holds {len(context.requests)} requests already"
        return self._superseded(key)

    async def _learn(self, json_schema: str) -> tuple[MoveRefusal, str] | None:
        try:
            async with asyncio.timeout(self._context.options.move_timeout_s * LEARN_SHARE):
                await self._engine().learn_schema(json_schema)
        except TimeoutError:
            return MoveRefusal.BUSY, "its schema is being compiled"
        except MoveRefused as error:
            return refusal_of(error.refusal), str(error)
        return None

    def _superseded(self, key: RequestKey) -> tuple[MoveRefusal, str] | None:
        try:
            self._context.requests.check_new(key)
        except Stale as error:
            return MoveRefusal.STALE, error.message
        return None

    async def _reserve(self, incoming: Incoming, message: MoveReserve) -> MoveReserveReply:
        if incoming.state in FINAL or incoming.state is _S.COMMITTING:
            incoming.take(_E.RESERVE)
            return self._no_room(MoveRefusal.UNKNOWN, f"{incoming.key} has ended here: {incoming.reason}")
        if self._moves.setdefault(incoming.key, incoming) is not incoming:
            return self._no_room(MoveRefusal.BUSY, f"{incoming.key} is asked for twice at once")
        incoming.take(_E.RESERVE)
        engine = self._engine()
        try:
            async with asyncio.timeout(self._context.options.move_timeout_s):
                reserved = await engine.reserve(
                    move_key(incoming.key),
                    unpack_layout(message.layout),
                    unpack_tokens(message.tokens),
                    message.slots,
                    message.deadline_s,
                )
        except MoveRefused as error:
            if incoming.take(_E.NO_ROOM) is _S.NEW:
                del self._moves[incoming.key]
            return self._no_room(refusal_of(error.refusal), str(error))
        except TimeoutError:
            self._abort(incoming, _E.ABORT, MoveRefusal.BUSY, "the engine makes no room in time")
            return self._no_room(MoveRefusal.BUSY, incoming.reason)
        if incoming.take(_E.ROOM) is not _S.RESERVED:
            if incoming.state is _S.ABORTED:
                self._spawn(engine.abort(move_key(incoming.key)))
            return self._no_room(MoveRefusal.UNKNOWN, f"{incoming.key} has ended here: {incoming.reason}")
        self._set_deadline(incoming, message.deadline_s)
        room = pack_room(reserved, self._context.gate.epoch)
        return MoveReserveReply(owner=self._context.owner, room=room, refusal=None)

    def _no_room(self, refusal: MoveRefusal, reason: str) -> MoveReserveReply:
        return MoveReserveReply(owner=self._context.owner, room=None, refusal=refusal, reason=shortened(reason))

    def _set_deadline(self, incoming: Incoming, deadline_s: float) -> None:
        if incoming.deadline is not None:
            incoming.deadline.cancel()
        loop = asyncio.get_running_loop()
        incoming.deadline = loop.call_later(
            deadline_s, self._abort, incoming, _E.EXPIRED, MoveRefusal.UNKNOWN, "nobody renewed the reservation"
        )

    # ---- committing

    async def _commit(self, incoming: Incoming, message: MoveCommit) -> None:
        incoming.take(_E.COMMIT)
        if incoming.deadline is not None:
            incoming.deadline.cancel()
        objection = self._commit_objection(message)
        if objection is not None:
            self._failed(incoming, None, *objection)
            return
        record = self._enter(message)
        try:
            committed = await self._commit_engine(record, message)
        except MoveRefused as error:
            self._failed(incoming, record, refusal_of(error.refusal), str(error))
        except Exception as error:
            if not isinstance(error, TimeoutError):
                logger.exception("%s can't be committed", incoming.key)
            # Whether the engine has it isn't known: if so, it ends there.
            self._context.engine.cancel(record.key)
            self._failed(incoming, record, MoveRefusal.BROKEN, f"{type(error).__name__}: {error}")
        else:
            self._committed(incoming, record, committed)

    def _commit_objection(self, message: MoveCommit) -> tuple[MoveRefusal, str] | None:
        context, now_s = self._context, self._context.now_s()
        context.leases.renew(message.frontend, message.lease_s, now_s)
        if not context.leases.is_live(message.frontend, now_s):
            return MoveRefusal.STALE, f"{message.frontend} has no lease"
        if context.gate.bars(message.epoch):
            return MoveRefusal.RETRY, f"the layout of {context.owner} has changed"
        generated = count_tokens(message.output) - message.base
        logprobs = None if message.logprobs is None else unpack_logprobs(message.logprobs).get(0)
        whole = message.sampling.logprobs is None or generated == len(logprobs or ())
        if generated < 0 or not whole:
            return MoveRefusal.INCOMPATIBLE, f"{generated} tokens, {len(logprobs or ())} log-probabilities"
        return self._superseded(message.destination_key)

    def _enter(self, message: MoveCommit) -> RequestRecord:
        """The record, before the engine has the request: its first tokens may come before the engine's answer."""
        context = self._context
        key, output = message.destination_key, unpack_tokens(message.output)
        trace = traces.begin(context.tracer, message, context.owner, len(output))
        record = RequestRecord(
            key,
            message.frontend,
            message.prompt,
            message.sampling,
            message.priority,
            message.base,
            output=output[message.base :],
            trace=trace,
            came_from=message.source,
            came_s=context.now_s(),
        )
        if message.sampling.logprobs is not None:
            known = unpack_logprobs(message.logprobs).get(0) if message.logprobs is not None else None
            record.logprobs = known or Logprobs(message.sampling.logprobs)
        older = context.requests.enter(record)
        if older is not None:
            context.engine.cancel(older.key)
        context.moved.back(key.request_id)
        return record

    async def _commit_engine(self, record: RequestRecord, message: MoveCommit) -> Committed:
        output = unpack_tokens(message.output)
        frozen = FrozenRequest(message.computed, tuple(output), message.state, None, message.kv_hashes)
        request = EngineRequest(record.key, unpack_tokens(message.prompt), output, message.sampling, message.priority)
        async with asyncio.timeout(message.timeout_s + ENGINE_MARGIN_S):
            return await self._engine().commit(move_key(record.key), frozen, request, message.timeout_s)

    def _committed(self, incoming: Incoming, record: RequestRecord, committed: Committed) -> None:
        incoming.runnable_ns = committed.runnable_ns
        incoming.take(_E.DONE)
        self._end(incoming)
        self._context.counters.arrival("committed")
        if record.muted:
            # Cancelled or superseded while the engine didn't know it yet.
            self._context.engine.cancel(record.key)
        elif incoming.unwanted:
            self._context.close(record.key)
        else:
            self._context.announce(record)

    def _failed(self, incoming: Incoming, record: RequestRecord | None, refusal: MoveRefusal, reason: str) -> None:
        requests = self._context.requests
        if record is not None:
            if record.trace is not None:
                record.trace.abandon(reason)
            requests.discard(record.key)
            requests.engine_ended(record)
        incoming.refusal, incoming.reason = refusal, reason
        incoming.take(_E.FAILED)
        self._end(incoming)
        self._context.counters.arrival("aborted")
        self._spawn(self._engine().abort(move_key(incoming.key)))

    # ---- pieces

    def _abort(self, incoming: Incoming, event: DestinationEvent, refusal: MoveRefusal, reason: str) -> None:
        """If it isn't decided, and isn't being decided, it is aborted."""
        before = incoming.state
        if incoming.take(event) is not _S.ABORTED or before is _S.ABORTED:
            return
        incoming.refusal, incoming.reason = refusal, reason
        self._end(incoming)
        if before is not _S.NEW:
            self._context.counters.arrival("aborted")
            self._spawn(self._engine().abort(move_key(incoming.key)))

    def _end(self, incoming: Incoming) -> None:
        if incoming.deadline is not None:
            incoming.deadline.cancel()
        self._moves.pop(incoming.key, None)
        incoming.until_s = self._context.now_s() + self._context.options.tombstone_s
        self._ended[incoming.key] = incoming
        if len(self._ended) > TOMBSTONES_MAX:
            del self._ended[next(iter(self._ended))]
        incoming.decided.set_result(None)

    def _find(self, key: RequestKey, source: Owner) -> Incoming:
        """What is known of it; not kept yet, if that is nothing."""
        incoming = self._moves.get(key) or self._ended.get(key) or Incoming(key, source)
        if incoming.source != source:
            raise Stale(f"{key} comes from {incoming.source}, not from {source}")
        return incoming

    def _check_owner(self, owner: Owner) -> None:
        if owner != self._context.owner:
            raise Stale(f"this is {self._context.owner}, not {owner}")

    def _engine(self) -> MovableEngine:
        engine = self._context.movable
        assert engine is not None, "reserve refuses all others"
        return engine

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and task.exception() is not None:
            logger.error("the end of a move failed", exc_info=task.exception())
