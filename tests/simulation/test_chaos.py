"""The whole mesh under random trouble: crashes, hangs, drains, partitions, lossy wires. `make soak` runs 1000 seeds."""

from functools import cache

import pytest

from meshift.services.simulation.chaos import LAYOUT_TROUBLES, Trouble
from meshift.services.simulation.chaos_run import ChaosResult, planned_events, run_chaos
from meshift.services.worker import batches, requests

SEEDS = range(10)
SOAK_SEEDS = range(1000)


@cache
def course(seed: int) -> ChaosResult:
    """Of one seed, for all tests that only look at it."""
    return run_chaos(seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_stream_is_altered_or_lost(seed: int) -> None:
    result = course(seed)
    assert all(outcome.finish is not None for outcome in result.outcomes)


def test_the_same_seed_takes_the_same_course() -> None:
    assert course(7).digest() == run_chaos(7).digest()
    assert course(7).digest() != course(8).digest()


@pytest.mark.parametrize("seed", range(2))
def test_messages_too_small_for_all_logprobs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What doesn't fit is asked for, piece by piece."""
    for module in (batches, requests):
        monkeypatch.setattr(module, "LOGPROB_MESSAGE_BYTES_MAX", 150)
    result = run_chaos(seed, events=3)
    assert all(outcome.finish is not None for outcome in result.outcomes)


def test_the_trouble_is_real() -> None:
    kinds = {event.trouble for seed in SEEDS for event in planned_events(seed)}
    assert kinds == set(Trouble) - LAYOUT_TROUBLES
    outcomes = [outcome for seed in range(6) for outcome in course(seed).outcomes]
    resumed = sum(outcome.attempts > 1 for outcome in outcomes)
    assert resumed > len(outcomes) / 20, "hardly a stream was disturbed: the test tests nothing"


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_a_thousand_seeds() -> None:
    broken = {}
    for seed in SOAK_SEEDS:
        try:
            run_chaos(seed)
        except Exception as error:
            broken[seed] = repr(error)
    assert not broken
