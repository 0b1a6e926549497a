"""The source's end of request moves, in the worker: commands to the ranks, and what their answers mean."""

from collections.abc import Callable
from dataclasses import dataclass

from meshift.backends.base import (
    DeltaSent,
    FrozenRequest,
    MoveBegun,
    MoveKey,
    MoveRefused,
    Refusal,
    Reserved,
)
from meshift.backends.bounded import BoundedSet
from meshift.backends.sglang import wire_moves as wire
from meshift.backends.sglang.instance import RankInstance
from meshift.backends.sglang.pairs import hashes_of, pairs_of, part_of, to_wire
from meshift.backends.sglang.questions import Question, accepted, agreed, same
from meshift.backends.sglang.requests import RequestTable
from meshift.backends.sglang.state import pack_state
from meshift.backends.sglang.wire import Answer
from meshift.kv_memory.layout import KvLayout
from meshift.schemas.base import unpack_tokens
from meshift.schemas.errors import Overloaded
from meshift.schemas.identity import RequestKey

LOST_MAX = 65_536
"""Moves of preempted requests that are remembered, to say so."""

ANSWER_TIMEOUT_S = 60.0
"""A rank answers between two steps, and a prefill step may take long."""

TRANSFER_TIMEOUT_S = 30.0
"""For one patch, from when it was gathered."""


@dataclass(slots=True)
class _Outgoing:
    """A request of ours that moves."""

    key: MoveKey
    rid: str
    layout: KvLayout | None
    """Of this instance when it began: with another one its KV is elsewhere."""
    generation: int = 0
    freezes: bool = False
    """It is frozen, or to be."""


class MovesOut:
    """The ranks hold the truth; here is which moves there are."""

    def __init__(
        self, instance: RankInstance, table: RequestTable, layout: Callable[[], KvLayout | None], *, verify: bool
    ) -> None:
        self._instance = instance
        self._table = table
        self._layout = layout
        self._verify = verify
        self._moves: dict[RequestKey, _Outgoing] = {}
        self._lost: BoundedSet[MoveKey] = BoundedSet(LOST_MAX)

    @property
    def frozen(self) -> int:
        """Requests that are frozen, or to be."""
        return sum(move.freezes for move in self._moves.values())

    def ended(self, key: RequestKey) -> None:
        """The request has finished, and its move with it."""
        self._moves.pop(key, None)

    async def begin(self, key: MoveKey) -> MoveBegun:
        """See `MovableEngine.begin_move`."""
        if self._layout() is None:
            raise MoveRefused("this engine's KV can't move", Refusal.INCOMPATIBLE)
        rid = self._table.rid(key.source)
        if rid is None:
            raise MoveRefused(f"{key.source} is not here", Refusal.UNKNOWN)
        if key.source in self._moves:
            raise MoveRefused(f"{key.source} moves already", Refusal.BUSY)
        move = self._moves[key.source] = _Outgoing(key, rid, self._layout())
        try:
            with self._instance.questions.ask() as question:
                self._send(wire.BeginMove(nonce=question.nonce, rid=rid))
                begun = agreed(await self._answers(question), wire.Begun)
        except BaseException:
            self._end(move)
            raise
        same([(answer.tokens, answer.generation) for answer in begun], "requests")
        move.generation = begun[0].generation
        self._lost.discard(key)
        self._moving(key)
        return MoveBegun(tuple(unpack_tokens(begun[0].tokens)), begun[0].growth_max)

    async def send(self, key: MoveKey, start: int, reserved: Reserved) -> DeltaSent:
        """See `MovableEngine.send_delta`."""
        move = self._moving(key)
        targets = self._targets(key, reserved)
        questions = self._instance.questions
        with questions.ask() as question, questions.ask() as sent_question:
            self._send(
                wire.SendDelta(
                    nonce=question.nonce,
                    sent_nonce=sent_question.nonce,
                    rid=move.rid,
                    generation=move.generation,
                    start=start,
                    end_max=reserved.slots,
                    targets=targets,
                    timeout_s=TRANSFER_TIMEOUT_S,
                )
            )
            # Not of one iteration: a rank whose network is slower gathers more slowly.
            gathered = accepted(await self._answers_of(move, question), wire.Gathered)
            same([(answer.start, answer.end) for answer in gathered], "rounds")
            gather_ns, transfer_ns = await self._applied(sent_question)
        self._moving(key)
        first = gathered[0]
        byte_count = sum(answer.byte_count for answer in gathered)
        return DeltaSent(first.start, first.end, byte_count, gather_ns, transfer_ns)

    async def freeze(self, key: MoveKey, start: int, reserved: Reserved | None) -> FrozenRequest:
        """See `MovableEngine.freeze`."""
        move = self._moving(key)
        if move.freezes:
            raise MoveRefused(f"{key} is frozen already", Refusal.BUSY)
        targets = self._targets(key, reserved) if reserved is not None and reserved.slots else []
        move.freezes = True
        try:
            return await self._freeze(move, start, reserved, targets)
        except BaseException:
            move.freezes = False
            self._thaw(move)
            raise

    async def _freeze(
        self, move: _Outgoing, start: int, reserved: Reserved | None, targets: list[wire.PairTarget]
    ) -> FrozenRequest:
        questions = self._instance.questions
        with questions.ask() as question, questions.ask() as sent_question:
            self._send(
                wire.Freeze(
                    nonce=question.nonce,
                    sent_nonce=sent_question.nonce,
                    rid=move.rid,
                    generation=move.generation,
                    copies=bool(targets),
                    start=start,
                    end_max=reserved.slots if reserved else 0,
                    hash_start=reserved.cached if reserved and self._verify else -1,
                    targets=targets,
                    timeout_s=TRANSFER_TIMEOUT_S,
                )
            )
            frozen = agreed(await self._answers_of(move, question), wire.FrozenAt)
            same([(answer.start, answer.end, answer.output) for answer in frozen], "frozen requests")
            times_ns = await self._applied(sent_question) if targets else None
        self._moving(move.key)
        return _frozen_request(frozen, times_ns)

    async def release(self, key: MoveKey) -> None:
        """See `MovableEngine.release`."""
        move = self._moves.get(key.source)
        if move is not None and move.key == key:
            with self._instance.questions.ask(lambda _: self._table.forget(key.source)) as question:
                self._send(wire.Release(nonce=question.nonce, rid=move.rid))
                await self._settled(question)
            self._end(move)

    async def resume(self, key: MoveKey, attempt: int) -> None:
        """See `MovableEngine.resume`."""
        move, rid = self._moves.get(key.source), self._table.rid(key.source)
        if rid is None or (move is not None and move.key != key):
            return
        now = key.source._replace(attempt=attempt)
        with self._instance.questions.ask(lambda _: self._table.rename(key.source, now)) as question:
            self._send(wire.Resume(nonce=question.nonce, rid=rid))
            await self._settled(question)
        if move is not None:
            self._end(move)

    # ---- inside ----

    def _end(self, move: _Outgoing) -> None:
        if self._moves.get(move.key.source) is move:
            del self._moves[move.key.source]

    def _thaw(self, move: _Outgoing) -> None:
        """Whether the ranks froze it or not, it goes on; whoever asks next comes later in their stream."""
        if self._moves.get(move.key.source) is move and self._instance.is_up:
            self._instance.send(wire.Resume(nonce=0, rid=move.rid))

    def _moving(self, key: MoveKey) -> _Outgoing:
        move = self._moves.get(key.source)
        if move is None or move.key != key:
            if key in self._lost and key.source in self._table:
                raise MoveRefused(f"{key}: the request was preempted", Refusal.PREEMPTED)
            raise MoveRefused(f"{key} is no move of a request here: it ended or never began", Refusal.UNKNOWN)
        if move.layout is not self._layout():
            raise MoveRefused(f"{key}: this instance's layers have moved meanwhile", Refusal.BROKEN)
        return move

    def _targets(self, key: MoveKey, reserved: Reserved) -> list[wire.PairTarget]:
        layout = self._layout()
        assert layout is not None
        mismatch = layout.mismatch(reserved.layout)
        if mismatch:
            raise MoveRefused(f"{key}: {mismatch}", Refusal.INCOMPATIBLE)
        pairs = pairs_of(key, layout, reserved.layout)
        if len(pairs) != len(reserved.targets):
            raise MoveRefused(f"{key}: {len(reserved.targets)} targets for {len(pairs)} pairs", Refusal.BROKEN)
        return [
            wire.PairTarget(part=part_of(index, pair, pair.source), address=to_wire(target))
            for index, (pair, target) in enumerate(zip(pairs, reserved.targets, strict=True))
        ]

    def _send(self, command: wire.SourceCommand) -> None:
        try:
            self._instance.send(command)
        except Overloaded as error:
            raise MoveRefused(str(error), Refusal.BUSY) from None

    async def _answers(self, question: Question) -> list[Answer]:
        try:
            return await question.answers(ANSWER_TIMEOUT_S)
        except TimeoutError:
            raise MoveRefused(f"ranks don't answer within {ANSWER_TIMEOUT_S} s", Refusal.BROKEN) from None
        except ConnectionError as error:
            raise MoveRefused(str(error), Refusal.UNKNOWN) from None

    async def _answers_of(self, move: _Outgoing, question: Question) -> list[Answer]:
        answers = await self._answers(question)
        if any(isinstance(answer, wire.Refused) and answer.refusal == Refusal.PREEMPTED for answer in answers):
            self._lost.add(move.key)
            self._end(move)
        return answers

    async def _applied(self, question: Question) -> tuple[int, int]:
        """The slowest rank's time for gathering, and until all was applied."""
        sent = [answer for answer in await self._answers(question) if isinstance(answer, wire.Sent)]
        errors = [answer.error for answer in sent if answer.error]
        if errors:
            raise MoveRefused(f"the transfer broke: {errors[0]}", Refusal.BROKEN)
        return max(answer.gather_ns for answer in sent), max(answer.transfer_ns for answer in sent)

    @staticmethod
    async def _settled(question: Question) -> None:
        """Wait for what can't be refused. Without the ranks there is nothing left to do."""
        try:
            agreed(await question.answers(ANSWER_TIMEOUT_S), wire.Done)
        except ConnectionError:
            return


def _frozen_request(frozen: list[wire.FrozenAt], times_ns: tuple[int, int] | None) -> FrozenRequest:
    """`times_ns`: of the last round, if there was one."""
    first = frozen[0]
    byte_count = sum(answer.byte_count for answer in frozen)
    return FrozenRequest(
        computed=first.end,
        output=tuple(unpack_tokens(first.output)),
        state=pack_state(first.state),
        delta=None if times_ns is None else DeltaSent(first.start, first.end, byte_count, *times_ns),
        kv_hashes=hashes_of(part for answer in frozen for part in answer.hashes),
        frozen_ns=min(answer.frozen_ns for answer in frozen),
    )
