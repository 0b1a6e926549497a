"""What moves are made of: what is remembered, counted, and put on the wire."""

import pytest

from meshift.backends.base import DeltaSent, MoveKey, Refusal, Reserved
from meshift.kv_memory.layout import KvLayout
from meshift.kv_memory.transport.base import Address
from meshift.schemas.identity import FrontendRef, Owner, RequestKey
from meshift.schemas.moves import MoveFigures, MoveMode, MoveOutcome, MoveRefusal
from meshift.schemas.requests import Priority, Sampling
from meshift.services.worker.drain import Drain
from meshift.services.worker.leases import Leases
from meshift.services.worker.moves import moved as module
from meshift.services.worker.moves import wire
from meshift.services.worker.moves.counters import MoveCounters
from meshift.services.worker.moves.moved import MovedAway
from meshift.services.worker.moves.tally import Tally
from meshift.services.worker.requests import RequestRecord, RequestTable

B, C = Owner("b", 1), Owner("c", 1)
FRONTEND = FrontendRef("f", 1)


def record(request_id: str = "r", attempt: int = 1, hop: int = 0) -> RequestRecord:
    key = RequestKey(request_id, attempt, hop)
    return RequestRecord(key, FRONTEND, b"", Sampling(max_new_tokens=8), Priority(), 0)


def test_where_a_request_went() -> None:
    away = MovedAway(10.0)
    away.add(record(), B, 0.0)
    found = away.get(RequestKey("r", 1, 0))
    assert found is not None
    assert (found.destination, found.destination_key) == (B, RequestKey("r", 1, 1))
    assert away.get(RequestKey("r", 1, 1)) is None
    assert away.get(RequestKey("r", 2, 0)) is None


def test_a_cancel_ends_the_whole_attempt_and_no_later_one() -> None:
    away = MovedAway(10.0)
    away.add(record(attempt=2, hop=3), B, 0.0)
    assert away.cancelled(RequestKey("r", 2, 0)) is not None
    assert away.cancelled(RequestKey("r", 3, 0)) is not None
    assert away.cancelled(RequestKey("r", 1, 9)) is None
    assert away.cancelled(RequestKey("other", 2, 0)) is None


def test_it_is_forgotten_when_the_new_owner_says_so() -> None:
    away = MovedAway(10.0)
    there = record()
    away.add(there, B, 0.0)
    assert away.over(RequestKey("r", 1, 1), C) is None
    assert away.over(RequestKey("r", 1, 2), B) is None
    assert away.over(RequestKey("r", 1, 1), B) is there
    assert len(away) == 0
    assert away.over(RequestKey("r", 1, 1), B) is None


def test_it_is_forgotten_in_time_and_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    away = MovedAway(10.0)
    for index in range(3):
        away.add(record(f"r{index}"), B, float(index))
    away.expire(10.5)
    assert len(away) == 2
    away.back("r1")
    assert away.get(RequestKey("r1", 1, 0)) is None
    monkeypatch.setattr(module, "MOVED_MAX", 2)
    for index in range(5):
        away.add(record(f"s{index}"), B, 20.0)
    assert len(away) == 2
    assert away.get(RequestKey("s4", 1, 0)) is not None


def test_a_tally_forgets_what_went_wrong_before_it_came_about() -> None:
    tally = Tally(1.0)
    tally.note(MoveRefusal.UNREACHABLE, "nobody there")
    tally.round(DeltaSent(0, 30, 300, 7, 8))
    tally.round(DeltaSent(30, 35, 50, 1, 2))
    tally.committed(1_000, 4_000)
    assert (tally.refusal, tally.reason) == (None, "")
    assert tally.figures(3.5) == MoveFigures(
        rounds=2,
        tokens=35,
        byte_count=350,
        gather_ns=8,
        transfer_ns=10,
        frozen_ns=3_000,
        duration_ns=2_500_000_000,
    )
    tally.committed(5_000, 4_000)
    assert tally.figures(3.5).frozen_ns == 0, "two machines' clocks"
    tally.committed(0, 4_000)
    assert tally.figures(3.5).frozen_ns == 0


def test_counters_tell_outcomes_apart() -> None:
    counters = MoveCounters()
    figures = MoveFigures(rounds=2, tokens=3, byte_count=4, frozen_ns=25_000_000, duration_ns=60_000_000)
    counters.settled(MoveMode.LIVE, MoveOutcome.MOVED, None, figures)
    counters.settled(MoveMode.LIVE, MoveOutcome.STAYED, MoveRefusal.NO_ROOM, figures)
    counters.settled(MoveMode.LIVE, MoveOutcome.STAYED, MoveRefusal.NO_ROOM, figures)
    assert counters.ended == {("live", "moved", "none"): 1, ("live", "stayed", "no_room"): 2}
    assert (counters.rounds, counters.tokens, counters.byte_count) == (6, 9, 12)
    assert (counters.durations.count, counters.frozen.count) == (1, 1)
    counters.settled(MoveMode.RECOMPUTE, MoveOutcome.MOVED, None, MoveFigures(duration_ns=1))
    assert (counters.durations.count, counters.frozen.count) == (2, 1)


def test_engine_words_and_wire_words() -> None:
    layout = KvLayout(((0, 2), (2, 4)), ((0, 1), (1, 2)), 64, "bfloat16", "w")
    reserved = Reserved(48, 16, layout, (Address("tcp", "h:1", 1, "t"), Address("tcp", "h:2", 0, "u")))
    assert wire.unpack_layout(wire.pack_layout(layout)) == layout
    room = wire.pack_room(reserved, 4)
    assert wire.unpack_room(room) == reserved
    assert room.epoch == 4
    assert wire.move_key(RequestKey("r", 2, 3)) == MoveKey("r", 2, 3)
    assert {wire.refusal_of(refusal).value for refusal in Refusal} == {refusal.value for refusal in Refusal}
    assert len(wire.shortened("x" * 5_000)) == 1_024


def test_what_is_left_of_a_lease() -> None:
    leases = Leases()
    leases.renew(FRONTEND, 5.0, 10.0)
    assert leases.left_s(FRONTEND, 12.0) == 3.0
    assert leases.left_s(FRONTEND, 20.0) == 0.0
    assert leases.left_s(FrontendRef("f", 2), 12.0) == 0.0
    assert leases.left_s(FrontendRef("g", 1), 12.0) == 0.0


def test_when_a_drain_may_end() -> None:
    drain = Drain(acknowledge_wait_s=2.0)
    drain.begin(10.0)
    drain.begin(20.0)
    assert drain.until_s == 10.0, "a later call may only shorten it"
    assert not drain.may_leave(1, 0, 9.0)
    assert not drain.may_leave(0, 1, 9.0)
    assert not drain.may_leave(0, 1, 10.9)
    assert drain.may_leave(0, 1, 11.0)
    assert drain.may_leave(0, 0, 9.5)
    assert Drain(2.0).may_leave(3, 0, 5.0), "the deadline is past"


def test_a_new_attempt_for_a_record() -> None:
    table, moving = RequestTable(60.0), record()
    assert table.enter(moving) is None
    table.rekey(moving, 2)
    assert moving.key == RequestKey("r", 2, 0)
    assert table.get(RequestKey("r", 1, 0)) is moving, "the engine may still call it so"
    table.forget_former(RequestKey("r", 1, 0))
    assert table.get(RequestKey("r", 1, 0)) is None
    assert table.get(RequestKey("r", 2, 0)) is moving
    assert table.close(RequestKey("r", 1, 5), 0.0) is None, "a late cancel of the old attempt"
    table.leave(moving, 0.0)
    assert table.find("r") is None
