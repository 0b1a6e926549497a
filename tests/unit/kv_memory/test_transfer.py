"""The transfer's decisions: its table, its figures, what a receiver accepts."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshift.kv_memory.rectangle import Rectangle
from meshift.kv_memory.transfer import (
    TRANSITIONS,
    ConvergenceRule,
    Coverage,
    IllegalTransition,
    NotApplied,
    Pair,
    PatchRefused,
    Reception,
    Transfer,
    TransferEvent,
    TransferState,
    next_state,
    plan_pairs,
)
from meshift.kv_memory.transport import Patch

S, E = TransferState, TransferEvent
PAIRS = [
    Pair("t/0-0", 0, 0, Rectangle(0, 2, 0, 100, 0, 1)),
    Pair("t/1-0", 1, 0, Rectangle(2, 4, 0, 100, 0, 1)),
]

EXPECTED = {
    #              ROUND        CAUGHT_UP    RESTART    FREEZE     COMMIT  ABORT
    S.COPYING: (S.COPYING, S.CONVERGED, S.COPYING, None, None, S.ABORTED),
    S.CONVERGED: (S.CONVERGED, S.CONVERGED, S.COPYING, S.CUTOVER, None, S.ABORTED),
    S.CUTOVER: (None, None, None, None, S.DONE, S.ABORTED),
    S.DONE: (None, None, None, None, None, None),
    S.ABORTED: (None, None, None, None, None, S.ABORTED),
}


@pytest.mark.parametrize(("state", "event"), list(product(S, E)))
def test_every_pair_of_state_and_event(state: TransferState, event: TransferEvent) -> None:
    expected = EXPECTED[state][list(E).index(event)]
    if expected is None:
        with pytest.raises(IllegalTransition, match=f"{event.value} while {state.value}"):
            next_state(state, event)
    else:
        assert next_state(state, event) is expected


def test_final_states_lead_nowhere_else() -> None:
    assert {TRANSITIONS[pair] for pair in TRANSITIONS if pair[0] in (S.DONE, S.ABORTED)} == {S.ABORTED}


# ---- when to stop copying live ----


@pytest.mark.parametrize(
    ("rule", "rounds", "left", "converged"),
    [
        (ConvergenceRule(50), 0, 0, False),
        (ConvergenceRule(50), 1, 50, True),
        (ConvergenceRule(50), 1, 51, False),
        (ConvergenceRule(50), 1000, 51, False),
        (ConvergenceRule(32, rounds_max=2), 1, 33, False),
        (ConvergenceRule(32, rounds_max=2), 2, 10**6, True),
        (ConvergenceRule(32, rounds_min=2, rounds_max=2), 1, 0, False),
        (ConvergenceRule(0, rounds_min=0, rounds_max=0), 0, 10**6, True),
    ],
)
def test_convergence_rule(rule: ConvergenceRule, rounds: int, left: int, converged: bool) -> None:
    assert rule.converged(rounds, left) is converged


def converging(rule: ConvergenceRule) -> Transfer:
    return Transfer(PAIRS, rule)


def test_the_slowest_pair_counts() -> None:
    transfer = converging(ConvergenceRule(10))
    transfer.observe_written(100)
    transfer.observe_applied(0, 100)
    transfer.observe_applied(1, 80)
    assert (transfer.applied, transfer.tokens_left) == (80, 20)
    assert transfer.finish_round() is S.COPYING
    transfer.observe_applied(1, 90)
    assert transfer.finish_round() is S.CONVERGED
    assert transfer.rounds == 2


def test_watermarks_never_fall() -> None:
    transfer = converging(ConvergenceRule(10))
    transfer.observe_written(100)
    transfer.observe_applied(0, 70)
    transfer.observe_applied(1, 90)
    transfer.observe_applied(0, 60)
    assert transfer.applied == 70
    with pytest.raises(ValueError, match="falls from 100 to 99"):
        transfer.observe_written(99)
    assert transfer.scheduled == 100
    transfer.observe_applied(0, 120)
    assert (transfer.scheduled, transfer.applied) == (120, 90)


def test_rewriting_can_not_keep_a_transfer_behind() -> None:
    """The same slots are written for ever: both figures grow, what is left stays small."""
    transfer = converging(ConvergenceRule(10))
    for written in range(5, 1000, 5):
        transfer.observe_written(written)
        transfer.observe_applied(0, written - 5)
        transfer.observe_applied(1, written - 5)
        assert transfer.tokens_left == 5
    assert transfer.finish_round() is S.CONVERGED


def test_blocking_copy_has_converged_at_once() -> None:
    transfer = converging(ConvergenceRule(0, rounds_min=0, rounds_max=0))
    assert transfer.state is S.CONVERGED
    assert converging(ConvergenceRule(0, rounds_min=0)).state is S.COPYING


def test_nothing_to_copy() -> None:
    transfer = Transfer([], ConvergenceRule(0, rounds_min=0, rounds_max=0))
    transfer.freeze(12)
    assert transfer.tokens_left == 0
    transfer.commit()
    assert transfer.state is S.DONE


# ---- cutover ----


def test_commit_waits_for_every_pair() -> None:
    transfer = converging(ConvergenceRule(10, rounds_min=0, rounds_max=0))
    transfer.freeze(100)
    transfer.observe_applied(0, 100)
    transfer.observe_applied(1, 99)
    with pytest.raises(NotApplied, match="t/1-0 have not applied 100"):
        transfer.commit()
    assert transfer.state is S.CUTOVER
    transfer.observe_applied(1, 100)
    transfer.commit()
    assert transfer.state.value == "done"


def test_freeze_checks_before_it_changes() -> None:
    transfer = converging(ConvergenceRule(10))
    transfer.observe_written(50)
    with pytest.raises(IllegalTransition):
        transfer.freeze(60)
    assert transfer.scheduled == 50
    transfer.finish_round()
    transfer.observe_applied(0, 50)
    transfer.observe_applied(1, 50)
    transfer.finish_round()
    with pytest.raises(ValueError, match="falls"):
        transfer.freeze(49)
    assert transfer.state is S.CONVERGED


def test_a_late_commit_finds_the_tombstone() -> None:
    transfer = converging(ConvergenceRule(0, rounds_min=0, rounds_max=0))
    transfer.freeze(0)
    transfer.abort("the destination did not answer")
    transfer.abort("again")
    assert (transfer.state, transfer.abort_reason) == (S.ABORTED, "the destination did not answer")
    with pytest.raises(IllegalTransition, match="commit while aborted"):
        transfer.commit()


def test_what_is_done_can_not_be_aborted() -> None:
    transfer = converging(ConvergenceRule(0, rounds_min=0, rounds_max=0))
    transfer.freeze(0)
    transfer.commit()
    with pytest.raises(IllegalTransition, match="abort while done"):
        transfer.abort("too late")
    assert transfer.abort_reason == ""


def test_restart_begins_anew_a_bounded_number_of_times() -> None:
    transfer = converging(ConvergenceRule(10, restarts_max=2))
    for _ in range(2):
        transfer.observe_written(100)
        transfer.observe_applied(0, 100)
        transfer.observe_applied(1, 100)
        assert transfer.finish_round() is S.CONVERGED
        assert transfer.restart() is S.COPYING
        assert (transfer.rounds, transfer.scheduled, transfer.applied) == (0, 0, 0)
        transfer.observe_written(3)
    assert transfer.restart() is S.ABORTED
    assert transfer.abort_reason == "the source's pages changed 3 times"


def test_a_frozen_writer_does_not_restart() -> None:
    transfer = converging(ConvergenceRule(10, rounds_min=0, rounds_max=0))
    transfer.freeze(10)
    with pytest.raises(IllegalTransition):
        transfer.restart()


def test_pairs_are_planned_alike_at_both_ends() -> None:
    whole = Rectangle(0, 6, 0, 10, 0, 2)
    stages = [Rectangle(0, 4, 0, 10, 0, 2), Rectangle(4, 6, 0, 10, 0, 2)]
    pairs = plan_pairs("move", whole, stages, [whole])
    assert pairs == [Pair("move/0-0", 0, 0, stages[0]), Pair("move/1-0", 1, 0, stages[1])]
    assert plan_pairs("move", whole, stages, [whole]) == pairs
    with pytest.raises(ValueError, match="destination"):
        plan_pairs("move", whole, stages, stages[:1])


# ---- coverage and reception ----

ranges = st.tuples(st.integers(0, 30), st.integers(0, 30))


@given(st.lists(ranges, max_size=12), ranges)
def test_coverage_is_a_set(added: list[tuple[int, int]], asked: tuple[int, int]) -> None:
    coverage, model = Coverage(), set[int]()
    for start, end in added:
        coverage.add(start, end)
        model.update(range(start, end))
    assert coverage.covers(*asked) == (set(range(*asked)) <= model)
    for start, end in zip(coverage._ends, coverage._starts[1:], strict=False):
        assert start < end
    coverage.clear()
    assert not coverage.covers(0, 1)
    assert coverage.covers(5, 5)


def patch(
    watermark: int, generation: int = 0, tokens: tuple[int, int] = (0, 10), layers: tuple[int, int] = (0, 2)
) -> Patch:
    return Patch("t/0-0", watermark, generation, Rectangle(*layers, *tokens, 0, 1), b"", 0)


def accept(reception: Reception, *patches: Patch) -> None:
    for one in patches:
        reception.accept(one)
        reception.record(one)


def test_reception_follows_patches() -> None:
    reception = Reception(PAIRS[0])
    accept(reception, patch(0), patch(10, tokens=(10, 20)), patch(10, tokens=(10, 20)))
    assert (reception.applied, reception.covers(0, 20), reception.covers(0, 21)) == (10, True, False)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (replace(patch(20), transfer_id="t/1-0"), "t/1-0"),
        (patch(20, tokens=(90, 101)), "not within"),
        (patch(20, layers=(1, 3)), "not within"),
        (patch(9, generation=1), "watermark 9 is older than 10"),
        (patch(20, generation=0), "generation 0 is older than 1"),
    ],
)
def test_reception_refuses_and_stays_as_it_was(bad: Patch, reason: str) -> None:
    reception = Reception(PAIRS[0])
    accept(reception, patch(10, generation=1))
    with pytest.raises(PatchRefused, match=reason):
        reception.accept(bad)
    assert (reception.applied, reception.generation, reception.covers(0, 10)) == (10, 1, True)


def test_newer_generation_starts_from_nothing() -> None:
    reception = Reception(PAIRS[0])
    accept(reception, patch(50, tokens=(0, 50)))
    reception.accept(patch(0, generation=1, tokens=(0, 5)))
    assert (reception.applied, reception.covers(0, 1)) == (0, False)
    reception.record(patch(0, generation=1, tokens=(0, 5)))
    assert (reception.covers(0, 5), reception.covers(0, 50)) == (True, False)


def test_a_patch_of_some_layers_covers_no_token() -> None:
    reception = Reception(PAIRS[0])
    accept(reception, patch(10, layers=(0, 1)), patch(10, layers=(1, 2)))
    assert reception.applied == 10
    assert not reception.covers(0, 1)


def test_an_empty_patch_carries_its_watermark_from_anywhere() -> None:
    reception = Reception(PAIRS[0])
    accept(reception, patch(10, tokens=(500, 500)))
    assert (reception.applied, reception.covers(500, 501)) == (10, False)
