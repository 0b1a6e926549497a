"""When a move copies on, and for how much room it asks."""

import pytest

from meshift.schemas.moves import MoveMode
from meshift.services.worker.moves.decisions import Progress, Rules

RULES = Rules(final_tokens=32, stages_max=3)


def progress(mode: MoveMode = MoveMode.LIVE, *, has_kv: bool = True) -> Progress:
    made = Progress(mode)
    made.begin(has_kv)
    return made


def test_at_least_one_round_is_live() -> None:
    move = progress()
    assert not move.is_last(10, RULES)
    move.round_sent(10, 12)
    assert move.is_last(12, RULES)


@pytest.mark.parametrize(("left", "last"), [(32, True), (33, False)])
def test_little_is_sent_with_the_request_stopped(left: int, last: bool) -> None:
    move = progress()
    move.round_sent(1_000, 1_000 + left)
    assert move.is_last(1_000 + left, RULES) is last


def test_the_last_stage_comes_however_much_is_left() -> None:
    move = progress()
    move.round_sent(1_000, 1_500)
    assert not move.is_last(1_500, RULES)
    move.round_sent(1_500, 2_500)
    assert move.is_last(2_500, RULES)


@pytest.mark.parametrize("mode", [MoveMode.BLOCKING, MoveMode.RECOMPUTE])
def test_other_modes_have_one_round(mode: MoveMode) -> None:
    assert progress(mode).is_last(1_000, RULES)


@pytest.mark.parametrize(
    ("computed", "grown", "growth_left", "slots"),
    [(100, 0, 1_000, 132), (100, 10, 1_000, 132), (100, 40, 1_000, 180), (100, 40, 7, 107), (100, 0, 0, 100)],
)
def test_room_is_asked_for_with_headroom(computed: int, grown: int, growth_left: int, slots: int) -> None:
    move = progress()
    move.round_sent(computed - grown, computed)
    assert move.slots_wanted(computed, growth_left, RULES) == slots


def test_each_time_that_it_outgrows_its_room_it_asks_for_twice_as_much() -> None:
    move = progress()
    move.round_sent(100, 100)
    wanted = []
    for outgrown in range(4):
        move.outgrown = outgrown
        wanted.append(move.slots_wanted(100, 1_000, RULES))
    assert wanted == [132, 164, 228, 356]
    assert move.slots_wanted(100, 150, RULES) == 250, "never more than it can become"


def test_state_only_needs_no_room() -> None:
    for move in (progress(MoveMode.RECOMPUTE), progress(has_kv=False)):
        assert move.slots_wanted(100, 100, RULES) == 0
        assert move.is_last(100, RULES)


def test_after_a_preemption_nothing_has_been_sent() -> None:
    move = progress()
    move.round_sent(50, 60)
    move.begin(True)
    assert (move.sent, move.rounds, move.grown, move.with_kv) == (0, 0, 0, True)
