"""The destination's end of request moves, in the worker: reservations with deadlines, and commits."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshift.backends.base import (
    Committed,
    EngineRequest,
    FrozenRequest,
    MoveKey,
    MoveRefused,
    Refusal,
    Reserved,
)
from meshift.backends.bounded import BoundedSet
from meshift.backends.sglang import wire
from meshift.backends.sglang import wire_moves as moves
from meshift.backends.sglang.instance import RankInstance
from meshift.backends.sglang.moves_out import ANSWER_TIMEOUT_S
from meshift.backends.sglang.pairs import from_wire, hashes_of, pairs_of, part_of
from meshift.backends.sglang.questions import Question, RanksDiffer, accepted, agreed, same
from meshift.backends.sglang.requests import RequestTable
from meshift.backends.sglang.state import unpack_state
from meshift.kv_memory.layout import KvLayout
from meshift.kv_memory.transport.base import Address
from meshift.schemas.base import pack_tokens
from meshift.schemas.errors import CallerError, Overloaded

TOMBSTONES_MAX = 65_536
"""Ended moves that are remembered, to refuse a late reserve or commit; the oldest go first."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Incoming:
    """A reservation."""

    key: MoveKey
    rid: str
    source: KvLayout
    parts: list[moves.PairPart]
    own: KvLayout
    """This instance's when it was opened."""
    tokens: tuple[int, ...] = ()
    """The first of the request's, by which the cached prefix was found."""
    cached: int = 0
    slots: int = 0
    targets: tuple[Address, ...] = ()
    at_ranks: bool = False
    """Whether the ranks have been asked for memory."""
    applied: dict[int, int] = field(default_factory=dict)
    """By pair: how many tokens have all their KV there."""
    progress: asyncio.Event = field(default_factory=asyncio.Event)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    timer: asyncio.TimerHandle | None = None
    ended: bool = False


class MovesIn:
    """Every reservation ends by commit, abort, its deadline, or the engine's end; a tombstone refuses what comes after
    the latter three."""

    def __init__(
        self,
        instance: RankInstance,
        table: RequestTable,
        layout: Callable[[], KvLayout | None],
        check: Callable[[EngineRequest], None],
    ) -> None:
        """`check` raises CallerError if this engine can't run a request."""
        self._instance = instance
        self._table = table
        self._layout = layout
        self._check = check
        self._incoming: dict[MoveKey, _Incoming] = {}
        self._by_rid: dict[str, _Incoming] = {}
        self._tombstones: BoundedSet[MoveKey] = BoundedSet(TOMBSTONES_MAX)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def reserved(self) -> int:
        """Reservations with room at the ranks."""
        return sum(move.at_ranks for move in self._incoming.values())

    # ---- reservations ----

    async def learn_schema(self, json_schema: str) -> None:
        """See `MovableEngine.learn_schema`."""
        with self._instance.questions.ask() as question:
            self._send(moves.LearnSchema(nonce=question.nonce, json_schema=json_schema))
            accepted(await self._answers(question), moves.Learned)
        self._send(moves.KeepSchema(json_schema=json_schema))

    async def reserve(
        self, key: MoveKey, layout: KvLayout, tokens: Sequence[int], slots: int, deadline_s: float
    ) -> Reserved:
        """See `MovableEngine.reserve`."""
        own = self._layout()
        self._check_open(key)
        mismatch = "this engine's KV can't move" if own is None else layout.mismatch(own)
        if mismatch or slots < len(tokens):
            raise MoveRefused(f"{key}: {mismatch or f'{slots} slots for {len(tokens)} tokens'}", Refusal.INCOMPATIBLE)
        assert own is not None
        move = self._incoming.get(key) or self._open(key, layout, own)
        self._renew(move, deadline_s)
        async with move.lock:
            self._check_alive(move)
            if slots > move.slots:
                await self._reserve(move, tokens, slots)
            self._renew(move, deadline_s)
            return Reserved(move.slots, move.cached, own, move.targets)

    async def _reserve(self, move: _Incoming, tokens: Sequence[int], slots: int) -> None:
        first = not move.at_ranks
        move.at_ranks = True
        try:
            with self._instance.questions.ask() as question:
                packed = pack_tokens(tokens) if first else b""
                parts = move.parts if first else []
                self._send(moves.Reserve(nonce=question.nonce, rid=move.rid, tokens=packed, slots=slots, parts=parts))
                reserved = agreed(await self._answers(question), moves.ReservedAt)
        except MoveRefused as error:
            if first and error.refusal is Refusal.NO_ROOM:
                move.at_ranks = False
                self._forget(move)
            raise
        same([(answer.cached, answer.slots) for answer in reserved], "reservations")
        move.cached, move.slots = reserved[0].cached, reserved[0].slots
        if first:
            move.tokens = tuple(tokens)
            targets = dict(target for answer in reserved for target in answer.targets)
            move.targets = tuple(from_wire(targets[pair]) for pair in range(len(move.parts)))

    def note_applied(self, report: moves.Applied) -> None:
        """A rank has written what arrived."""
        move = self._by_rid.get(report.rid)
        if move is not None:
            move.applied[report.pair] = report.tokens
            move.progress.set()

    async def abort(self, key: MoveKey) -> None:
        """See `MovableEngine.abort`."""
        self._tombstones.add(key)
        move = self._incoming.get(key)
        if move is not None:
            async with move.lock:
                await self._close(move)

    def end(self) -> None:
        """The ranks are gone, and all memory with them."""
        for move in list(self._incoming.values()):
            self._tombstones.add(move.key)
            self._forget(move)

    # ---- commit ----

    async def commit(self, key: MoveKey, frozen: FrozenRequest, request: EngineRequest, timeout_s: float) -> Committed:
        """See `MovableEngine.commit`."""
        move = self._incoming.get(key)
        if move is None:
            raise MoveRefused(f"{key} has no reservation here", Refusal.UNKNOWN)
        async with move.lock:
            self._check_alive(move)
            state = unpack_state(frozen.state)
            arrival = self._arrival(move, frozen, request)
            if frozen.computed:
                await self._check_arrived(move, frozen, timeout_s)
            elif move.at_ranks:
                await self._free(move)
            committed = await self._commit(move, frozen.computed, arrival, state, timeout_s)
            self._forget(move)
            return committed

    async def _commit(
        self, move: _Incoming, computed: int, arrival: EngineRequest, state: moves.MovedState, timeout_s: float
    ) -> Committed:
        try:
            submit = self._table.open(arrival, state.seed, moved=True)
        except CallerError as error:
            raise MoveRefused(f"{move.key}: {error}", Refusal.UNKNOWN) from error
        try:
            with self._instance.questions.ask() as question:
                self._send(wire.Commit(nonce=question.nonce, submit=submit, computed=computed, state=state))
                answers = await self._decided(move, question, timeout_s)
                committed = agreed(answers, moves.CommittedAt)
        except BaseException:
            self._table.forget(arrival.key, ended=False)
            raise
        return Committed(max(answer.runnable_ns for answer in committed))

    async def _decided(self, move: _Incoming, question: Question, timeout_s: float) -> list[wire.Answer]:
        """Answers to a commit. It can wait for a schema to be compiled; when that takes too long the ranks are asked to
        give up, and what they say then holds."""
        try:
            return await question.answers(timeout_s)
        except TimeoutError:
            self._send(moves.Recall(rid=move.rid))
        except ConnectionError as error:
            raise MoveRefused(str(error), Refusal.UNKNOWN) from None
        try:
            return await question.answers(ANSWER_TIMEOUT_S)
        except ConnectionError as error:
            raise MoveRefused(str(error), Refusal.UNKNOWN) from None
        except TimeoutError:
            raise RanksDiffer(f"{move.key}: the ranks don't say whether they run it") from None

    def _arrival(self, move: _Incoming, frozen: FrozenRequest, request: EngineRequest) -> EngineRequest:
        """The request as it is to run here. Raises MoveRefused if it doesn't belong to what was frozen and reserved."""
        output, known = frozen.output, len(request.prompt) + len(frozen.output)
        arrival = EngineRequest(request.key, request.prompt, output, request.sampling, request.priority)
        whole = not frozen.computed or (frozen.computed == known - 1 and output)
        begins = (*request.prompt, *output)[: len(move.tokens)] == move.tokens
        if request.key != move.key.destination or tuple(request.output) != output[: len(request.output)]:
            raise MoveRefused(f"{move.key}: {request.key} is another request, or its output", Refusal.INCOMPATIBLE)
        if not whole or (frozen.computed and not begins):
            reason = f"{frozen.computed} of {known} tokens computed, or not those reserved for"
            raise MoveRefused(f"{move.key}: {reason}", Refusal.INCOMPATIBLE)
        try:
            self._check(arrival)
        except CallerError as error:
            raise MoveRefused(f"{move.key}: {error}", Refusal.INCOMPATIBLE) from error
        return arrival

    async def _check_arrived(self, move: _Incoming, frozen: FrozenRequest, timeout_s: float) -> None:
        """Raises MoveRefused unless all of it lies in every rank's slots."""
        if frozen.computed > move.slots:
            raise MoveRefused(f"{move.key}: {frozen.computed} tokens in {move.slots} slots", Refusal.NO_ROOM)
        try:
            async with asyncio.timeout(timeout_s):
                # The source knows of it from the transport, by another way than the ranks' reports take.
                while (applied := self._applied(move)) < frozen.computed:
                    move.progress.clear()
                    await move.progress.wait()
        except TimeoutError:
            reason = f"{applied} of {frozen.computed} tokens arrived"
            raise MoveRefused(f"{move.key}: {reason}", Refusal.BROKEN) from None
        if frozen.kv_hashes:
            await self._compare(move, frozen)

    @staticmethod
    def _applied(move: _Incoming) -> int:
        return min(max(move.cached, move.applied.get(part.pair, 0)) for part in move.parts)

    async def _compare(self, move: _Incoming, frozen: FrozenRequest) -> None:
        with self._instance.questions.ask() as question:
            self._send(moves.HashReserved(nonce=question.nonce, rid=move.rid, start=move.cached, end=frozen.computed))
            answers = agreed(await self._answers(question), moves.Hashes)
        if hashes_of(part for answer in answers for part in answer.hashes) != frozen.kv_hashes:
            raise MoveRefused(f"{move.key}: what arrived is not what was sent", Refusal.BROKEN)

    # ---- inside ----

    def _check_open(self, key: MoveKey) -> None:
        if key in self._tombstones or self._table.has_seen(key.destination):
            raise MoveRefused(f"{key} has ended here", Refusal.UNKNOWN)

    def _check_alive(self, move: _Incoming) -> None:
        if move.ended:
            raise MoveRefused(f"{move.key} has ended here", Refusal.UNKNOWN)
        if move.at_ranks and move.own is not self._layout():
            raise MoveRefused(f"{move.key}: this instance's layers have moved meanwhile", Refusal.BROKEN)

    def _open(self, key: MoveKey, source: KvLayout, own: KvLayout) -> _Incoming:
        try:
            pairs = pairs_of(key, source, own)
        except ValueError as error:
            raise MoveRefused(f"{key}: {error}", Refusal.INCOMPATIBLE) from None
        parts = [part_of(index, pair, pair.destination) for index, pair in enumerate(pairs)]
        move = _Incoming(key, wire.encode_rid(key.destination), source, parts, own)
        self._incoming[key] = self._by_rid[move.rid] = move
        return move

    def _renew(self, move: _Incoming, deadline_s: float) -> None:
        if move.timer is not None:
            move.timer.cancel()
        move.timer = asyncio.get_running_loop().call_later(deadline_s, self._expire, move)

    def _expire(self, move: _Incoming) -> None:
        logger.info("reservation %s has expired", move.key)
        self._keep(self.abort(move.key))

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _close(self, move: _Incoming) -> None:
        """End it unless it has ended; its lock is held."""
        if move.ended:
            return
        if move.at_ranks:
            await self._free(move)
        self._forget(move)

    async def _free(self, move: _Incoming) -> None:
        """Writers go quiet on all ranks, then the stream frees. Repeated until the ranks have done it or are gone."""
        while self._instance.is_up:
            try:
                with self._instance.questions.ask() as question:
                    self._instance.send(moves.Quiesce(nonce=question.nonce, rid=move.rid))
                    await question.answers(ANSWER_TIMEOUT_S)
                with self._instance.questions.ask() as question:
                    self._instance.send(moves.Unreserve(nonce=question.nonce, rid=move.rid))
                    agreed(await question.answers(ANSWER_TIMEOUT_S), moves.Done)
                break
            except ConnectionError:
                break
            except (TimeoutError, Overloaded) as error:
                logger.warning("reservation %s is not freed yet: %r", move.key, error)
                await asyncio.sleep(0)
        move.at_ranks = False

    def _forget(self, move: _Incoming) -> None:
        move.ended = True
        if move.timer is not None:
            move.timer.cancel()
        if self._incoming.get(move.key) is move:
            del self._incoming[move.key], self._by_rid[move.rid]

    def _send(self, command: wire.Command) -> None:
        try:
            self._instance.send(command)
        except Overloaded as error:
            raise MoveRefused(str(error), Refusal.BUSY) from None

    @staticmethod
    async def _answers(question: Question) -> list[wire.Answer]:
        try:
            return await question.answers(ANSWER_TIMEOUT_S)
        except TimeoutError:
            raise MoveRefused(f"ranks don't answer within {ANSWER_TIMEOUT_S} s", Refusal.BROKEN) from None
        except ConnectionError as error:
            raise MoveRefused(str(error), Refusal.UNKNOWN) from None
