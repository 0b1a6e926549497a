"""Taking many steps at once changes no time, no token, no load, and no outcome of a move."""

import pytest

from tests.unit.sim.scenario import PARAMETERS, Log, observe

SEEDS = range(6)


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("seed", SEEDS)
def test_skipped_and_single_steps_look_the_same(seed: int, name: str) -> None:
    single = observe(seed, PARAMETERS[name], skip_steps=False, emit="edges")
    skipped = observe(seed, PARAMETERS[name], skip_steps=True, emit="edges")
    assert single.moves == skipped.moves, f"seed {seed}"
    assert single.events == skipped.events, f"seed {seed}"
    assert single.loads == skipped.loads, f"seed {seed}"
    for skip_steps in (False, True):
        # Emitting every step splits the events and changes nothing else.
        other = observe(seed, PARAMETERS[name], skip_steps=skip_steps, emit="step")
        assert other.moves == single.moves, f"seed {seed}"
        assert other.loads == single.loads, f"seed {seed}"
        assert other.ends() == single.ends(), f"seed {seed}"
        assert other.firsts() == single.firsts(), f"seed {seed}"
        assert other.streams() == single.streams(), f"seed {seed}"


def test_the_scenarios_are_eventful() -> None:
    logs: list[Log] = [
        observe(seed, parameters, skip_steps=True, emit="edges") for parameters in PARAMETERS.values() for seed in SEEDS
    ]
    finishes = [finish for log in logs for ends in log.ends() for _, _, finish in ends]
    outcomes = [str(outcome[2]) for log in logs for outcome in log.moves if isinstance(outcome, tuple)]
    assert sum(outcome == "moved" for outcome in outcomes) > 10
    for what in ("given up", "wanted", "not here", "is in prefill"):
        assert any(what in outcome for outcome in outcomes), what
    reasons = [getattr(finish, "reason", "") for finish in finishes]
    assert {"length", "stop", "cancelled"} <= set(reasons)
    assert sum(getattr(finish, "preemptions", 0) > 0 for finish in finishes) > 10
