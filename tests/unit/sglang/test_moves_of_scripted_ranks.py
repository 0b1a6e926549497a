"""Both ends of moves in the worker, with ranks that answer as they are told."""

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from meshift.backends.base import EngineRequest, FrozenRequest, MoveKey, MoveRefused, Refusal, Reserved
from meshift.backends.sglang import wire, wire_moves
from meshift.backends.sglang.instance import RankInstance
from meshift.backends.sglang.moves_in import MovesIn
from meshift.backends.sglang.moves_out import MovesOut
from meshift.backends.sglang.questions import RanksDiffer
from meshift.backends.sglang.requests import RequestTable
from meshift.backends.sglang.state import pack_state
from meshift.kv_memory.transport.base import Address
from meshift.schemas.errors import ContextTooLong
from meshift.schemas.requests import Sampling
from tests.unit.sglang.scripted_ranks import LAYOUT, STATE, ScriptedRanks, common

KEY = MoveKey("r", 1, 1)
SAMPLING = Sampling(max_new_tokens=12)
ADDRESSES = (Address("tcp", "127.0.0.1:1", 0, "t"),) * 2
RESERVED = Reserved(8, 0, LAYOUT, ADDRESSES)
FROZEN = FrozenRequest(4, (4, 5), pack_state(STATE), None)
LONG_S = 30.0


class Ends:
    """Both ends, on scripted ranks of their own."""

    def __init__(self, *, verify: bool = False) -> None:
        self.ranks = ScriptedRanks()
        self.table = RequestTable()
        self.problem: Exception | None = None
        instance = cast(RankInstance, self.ranks)
        self.out = MovesOut(instance, self.table, lambda: LAYOUT, verify=verify)
        self.into = MovesIn(instance, self.table, lambda: LAYOUT, self._check)

    def _check(self, request: EngineRequest) -> None:
        if self.problem is not None:
            raise self.problem

    def run_request(self) -> None:
        """It runs here."""
        self.table.open(EngineRequest(KEY.source, [1, 2, 3], (), SAMPLING), seed=1)

    async def reserve(self, slots: int = 6, deadline_s: float = LONG_S) -> Reserved:
        return await self.into.reserve(KEY, LAYOUT, [1, 2, 3, 4], slots, deadline_s)

    def apply(self, *tokens: int) -> None:
        """The pairs have so many."""
        for pair, count in enumerate(tokens):
            rid = wire.encode_rid(KEY.destination)
            self.into.note_applied(wire_moves.Applied(rank=pair, rid=rid, pair=pair, tokens=count))

    async def commit(self, frozen: FrozenRequest = FROZEN, timeout_s: float = LONG_S, **changes: Any) -> int:
        request = EngineRequest(KEY.destination, [1, 2, 3], (4, 5), SAMPLING)
        return (await self.into.commit(KEY, frozen, replace(request, **changes), timeout_s)).runnable_ns


@pytest.fixture
def ends() -> Ends:
    return Ends()


async def refused(call: Any, refusal: Refusal) -> None:
    with pytest.raises(MoveRefused) as caught:
        await call
    assert caught.value.refusal is refusal, caught.value


# ---- the source


async def test_a_whole_move_away(ends: Ends) -> None:
    ends.run_request()
    begun = await ends.out.begin(KEY)
    assert (begun.tokens, begun.growth_max) == ((1, 2, 3, 4), 9)
    sent = await ends.out.send(KEY, 0, RESERVED)
    assert (sent.start, sent.end, sent.byte_count, sent.gather_ns, sent.transfer_ns) == (0, 4, 16, 1, 5)
    frozen = await ends.out.freeze(KEY, 4, RESERVED)
    assert (frozen.computed, frozen.output, frozen.frozen_ns) == (4, (4, 5), 50)
    assert frozen.delta is not None
    await ends.out.release(KEY)
    await ends.out.release(KEY)
    assert ends.ranks.kinds() == ["BeginMove", "SendDelta", "Freeze", "Release"]
    assert not len(ends.table)
    targets = cast(wire_moves.SendDelta, ends.ranks.sent[1]).targets
    assert [(target.part.rank, target.part.layer_start) for target in targets] == [(0, 0), (1, 2)]


async def test_without_kv_nothing_is_sent(ends: Ends) -> None:
    ends.run_request()
    await ends.out.begin(KEY)
    frozen = await ends.out.freeze(KEY, 0, None)
    assert (frozen.computed, frozen.delta) == (0, None)
    assert not cast(wire_moves.Freeze, ends.ranks.sent[-1]).copies


async def test_who_does_not_move(ends: Ends) -> None:
    await refused(ends.out.begin(KEY), Refusal.UNKNOWN)
    ends.run_request()
    ends.ranks.refuse(wire_moves.BeginMove, "busy")
    await refused(ends.out.begin(KEY), Refusal.BUSY)
    del ends.ranks.scripts[wire_moves.BeginMove]
    await ends.out.begin(KEY)
    await refused(ends.out.begin(KEY), Refusal.BUSY)
    other = replace(RESERVED, layout=replace(LAYOUT, weights="others"))
    await refused(ends.out.send(KEY, 0, other), Refusal.INCOMPATIBLE)
    await refused(ends.out.send(KEY, 0, replace(RESERVED, targets=ADDRESSES[:1])), Refusal.BROKEN)
    ends.out.ended(KEY.source)
    await refused(ends.out.send(KEY, 0, RESERVED), Refusal.UNKNOWN)


async def test_a_freeze_that_fails_lets_it_go_on(ends: Ends) -> None:
    ends.run_request()
    await ends.out.begin(KEY)
    usual = ends.ranks.scripts.get(wire_moves.Freeze)
    assert usual is None

    def broken(command: wire_moves.Freeze, rank: int) -> list[wire.Answer]:
        from tests.unit.sglang.scripted_ranks import usual as answer

        error = "no route" if rank else ""
        sent = wire_moves.Sent(rank=rank, nonce=command.sent_nonce, error=error, gather_ns=1, transfer_ns=1)
        return [answer(command, rank)[0], sent]

    ends.ranks.scripts[wire_moves.Freeze] = broken
    await refused(ends.out.freeze(KEY, 0, RESERVED), Refusal.BROKEN)
    assert ends.ranks.kinds()[-2:] == ["Freeze", "Resume"]
    del ends.ranks.scripts[wire_moves.Freeze]
    await ends.out.freeze(KEY, 0, RESERVED)
    await refused(ends.out.freeze(KEY, 0, RESERVED), Refusal.BUSY)


async def test_a_freeze_that_is_given_up_lets_it_go_on(ends: Ends) -> None:
    ends.run_request()
    await ends.out.begin(KEY)
    ends.ranks.scripts[wire_moves.Freeze] = None
    freezing = asyncio.ensure_future(ends.out.freeze(KEY, 0, RESERVED))
    await asyncio.sleep(0)
    freezing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await freezing
    assert ends.ranks.kinds()[-1] == "Resume"


async def test_preempted_while_moving(ends: Ends) -> None:
    ends.run_request()
    await ends.out.begin(KEY)
    ends.ranks.refuse(wire_moves.SendDelta, "preempted")
    await refused(ends.out.send(KEY, 0, RESERVED), Refusal.PREEMPTED)
    await refused(ends.out.freeze(KEY, 0, RESERVED), Refusal.PREEMPTED)
    await ends.out.begin(KEY)
    await ends.out.freeze(KEY, 0, None)


async def test_a_resume_renames_where_the_ranks_do(ends: Ends) -> None:
    ends.run_request()
    await ends.out.begin(KEY)
    ends.ranks.scripts[wire_moves.Resume] = None
    resuming = asyncio.ensure_future(ends.out.resume(KEY, 2))
    await asyncio.sleep(0)
    assert KEY.source in ends.table
    nonce = cast(wire_moves.Resume, ends.ranks.sent[-1]).nonce
    ends.ranks.questions.note(wire_moves.Done(**common(0, nonce)))
    # Rank 0 reports tokens: what it says from now on is of the new attempt, though rank 1 hasn't answered yet.
    assert KEY.source not in ends.table
    assert KEY.source._replace(attempt=2) in ends.table
    ends.ranks.questions.note(wire_moves.Done(**common(1, nonce)))
    await resuming
    await ends.out.resume(KEY, 2)


async def test_ranks_that_differ(ends: Ends) -> None:
    ends.run_request()
    ends.ranks.scripts[wire_moves.BeginMove] = lambda command, rank: [
        wire_moves.Begun(**common(rank, command.nonce), tokens=b"", growth_max=1, generation=rank)
    ]
    with pytest.raises(RanksDiffer):
        await ends.out.begin(KEY)


# ---- the destination


async def test_a_whole_move_to_here(ends: Ends) -> None:
    first = await ends.reserve()
    assert (first.slots, first.cached, first.layout, first.targets) == (8, 0, LAYOUT, ADDRESSES)
    again = await ends.reserve(slots=9)
    assert (again.slots, again.targets) == (12, ADDRESSES)
    assert (await ends.reserve(slots=4)).slots == 12
    assert ends.ranks.kinds() == ["Reserve", "Reserve"]
    ends.apply(4, 4)
    assert await ends.commit() == 101
    assert KEY.destination in ends.table
    await refused(ends.commit(), Refusal.UNKNOWN)
    await refused(ends.reserve(), Refusal.UNKNOWN)
    await ends.into.abort(KEY)
    assert ends.ranks.kinds()[2:] == ["Commit"]


async def test_a_commit_waits_for_every_pair(ends: Ends) -> None:
    await ends.reserve()
    ends.apply(4, 3)
    await refused(ends.commit(timeout_s=0.01), Refusal.BROKEN)
    committing = asyncio.ensure_future(ends.commit())
    await asyncio.sleep(0.01)
    assert not committing.done()
    ends.apply(4, 4)
    await committing


async def test_what_does_not_belong_together(ends: Ends) -> None:
    await ends.reserve()
    ends.apply(9, 9)
    for frozen in (replace(FROZEN, computed=5), replace(FROZEN, output=(4,)), replace(FROZEN, state=b"x")):
        await refused(ends.commit(frozen), Refusal.INCOMPATIBLE)
    for changes in ({"key": KEY.source}, {"output": (9,)}, {"prompt": [1, 2, 9]}):
        await refused(ends.commit(**changes), Refusal.INCOMPATIBLE)
    ends.problem = ContextTooLong("too long")
    await refused(ends.commit(), Refusal.INCOMPATIBLE)
    assert "Commit" not in ends.ranks.kinds()
    ends.problem = None
    await ends.commit()


async def test_a_refused_commit_leaves_the_reservation(ends: Ends) -> None:
    await ends.reserve()
    ends.apply(4, 4)
    ends.ranks.refuse(wire.Commit, "no_room")
    await refused(ends.commit(), Refusal.NO_ROOM)
    assert not ends.table.has_seen(KEY.destination)
    del ends.ranks.scripts[wire.Commit]
    await ends.commit()


async def test_a_commit_that_takes_too_long_is_recalled(ends: Ends) -> None:
    await ends.reserve()
    ends.apply(4, 4)
    ends.ranks.scripts[wire.Commit] = None

    def recall(command: wire_moves.Recall, rank: int) -> list[wire.Answer]:
        commit = next(sent for sent in ends.ranks.sent if isinstance(sent, wire.Commit))
        return [wire_moves.Refused(**common(rank, commit.nonce), refusal="broken", message="in time")]

    ends.ranks.scripts[wire_moves.Recall] = recall
    await refused(ends.commit(timeout_s=0.01), Refusal.BROKEN)
    assert ends.ranks.kinds() == ["Reserve", "Commit", "Recall"]


@pytest.mark.parametrize("hashes", [(1, 1), (1, 2)])
async def test_hashes_are_compared(ends: Ends, hashes: tuple[int, ...]) -> None:
    await ends.reserve()
    ends.apply(4, 4)
    ends.ranks.scripts[wire_moves.HashReserved] = lambda command, rank: [
        wire_moves.Hashes(
            **common(rank, command.nonce), hashes=[wire_moves.PairHash(pair=rank, hash="0" * 14 + "1" + "f" * 17)]
        )
    ]
    frozen = replace(FROZEN, kv_hashes=hashes)
    if hashes == (1, 1):
        await ends.commit(frozen)
    else:
        await refused(ends.commit(frozen), Refusal.BROKEN)


async def test_an_abort_is_two_phased(ends: Ends) -> None:
    await ends.reserve()
    await ends.into.abort(KEY)
    await ends.into.abort(KEY)
    assert ends.ranks.kinds() == ["Reserve", "Quiesce", "Unreserve"]
    await refused(ends.reserve(), Refusal.UNKNOWN)
    await refused(ends.commit(), Refusal.UNKNOWN)


async def test_an_abort_comes_first(ends: Ends) -> None:
    await ends.into.abort(KEY)
    await refused(ends.reserve(), Refusal.UNKNOWN)
    assert ends.ranks.sent == []


async def test_a_reservation_expires(ends: Ends) -> None:
    await ends.reserve(deadline_s=0.02)
    await ends.reserve(deadline_s=0.01)
    async with asyncio.timeout(5.0):
        while ends.ranks.kinds() != ["Reserve", "Quiesce", "Unreserve"]:
            await asyncio.sleep(0.002)
    await refused(ends.reserve(), Refusal.UNKNOWN)


async def test_no_room_leaves_nothing(ends: Ends) -> None:
    ends.ranks.refuse(wire_moves.Reserve, "no_room")
    await refused(ends.reserve(), Refusal.NO_ROOM)
    await ends.into.abort(KEY)
    assert ends.ranks.kinds() == ["Reserve"]


async def test_no_room_to_grow_leaves_what_there_was(ends: Ends) -> None:
    await ends.reserve()
    ends.ranks.refuse(wire_moves.Reserve, "no_room")
    await refused(ends.reserve(slots=99), Refusal.NO_ROOM)
    ends.apply(4, 4)
    await ends.commit()


async def test_state_only(ends: Ends) -> None:
    reserved = await ends.into.reserve(KEY, LAYOUT, (), 0, LONG_S)
    assert (reserved.slots, reserved.targets) == (0, ())
    await ends.commit(replace(FROZEN, computed=0))
    assert ends.ranks.kinds() == ["Commit"]


async def test_state_only_after_all_frees_the_slots(ends: Ends) -> None:
    await ends.reserve()
    await ends.commit(replace(FROZEN, computed=0))
    assert ends.ranks.kinds() == ["Reserve", "Quiesce", "Unreserve", "Commit"]


async def test_incompatible(ends: Ends) -> None:
    other = replace(LAYOUT, dtype="bfloat16")
    await refused(ends.into.reserve(KEY, other, (), 4, LONG_S), Refusal.INCOMPATIBLE)
    await refused(ends.into.reserve(KEY, LAYOUT, [1, 2, 3], 2, LONG_S), Refusal.INCOMPATIBLE)
    assert ends.ranks.sent == []


async def test_dead_ranks_hold_nothing(ends: Ends) -> None:
    await ends.reserve()
    ends.ranks.is_up = False
    ends.into.end()
    await ends.into.abort(KEY)
    await refused(ends.commit(), Refusal.UNKNOWN)
    assert ends.ranks.kinds() == ["Reserve"]
