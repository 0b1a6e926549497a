"""The whole mesh under random trouble while layouts change and requests move: crashes, partitions, lossy wires, dying
coordinators. `make soak` runs 2000 seeds."""

from collections import Counter
from functools import cache

import pytest

from meshift.services.simulation.chaos import Trouble
from meshift.services.simulation.chaos_run import ChaosResult, changing_pipeline, planned_events, run_chaos

SEEDS = range(6)
SOAK_SEEDS = range(2000)


@cache
def course(seed: int) -> ChaosResult:
    """Of one seed, for all tests that only look at it."""
    return run_chaos(seed, pipeline=changing_pipeline())


@pytest.mark.parametrize("seed", SEEDS)
def test_no_stream_is_altered_or_lost(seed: int) -> None:
    print(f"seed {seed}")
    assert all(outcome.finish is not None for outcome in course(seed).outcomes)


def test_the_same_seed_takes_the_same_course() -> None:
    again = run_chaos(5, pipeline=changing_pipeline())
    assert (course(5).digest(), course(5).changes) == (again.digest(), again.changes)


def test_the_trouble_is_real() -> None:
    kinds = {event.trouble for seed in SEEDS for event in planned_events(seed, layouts=True)}
    assert kinds == set(Trouble)
    changes: Counter[tuple[str, str]] = Counter()
    moves: Counter[str] = Counter()
    for seed in SEEDS:
        changes.update(course(seed).changes)
        for (_, outcome, refusal), count in course(seed).moves.items():
            moves[outcome] += count
            moves[refusal] += count
    outcomes = {outcome for outcome, _ in changes}
    assert {"committed", "aborted", "refused", "lost"} <= outcomes, changes
    assert changes["committed", ""] > 15, changes
    refusals = {refusal for _, refusal in changes}
    assert {"deadline", "cancelled", "no_memory", "busy"} <= refusals, changes
    assert moves["moved"] > 15, moves
    assert moves["retry"] > 0, moves


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_two_thousand_seeds() -> None:
    broken = {}
    for seed in SOAK_SEEDS:
        try:
            run_chaos(seed, pipeline=changing_pipeline())
        except Exception as error:
            broken[seed] = repr(error)
    assert not broken
