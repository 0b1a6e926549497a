"""The comparison of a real run with its simulation, with a simulation in the real run's place."""

from typing import Any

import pytest

from meshift.backends.sim.parameters import SimParameters
from meshift.benchmarks.fidelity import (
    FidelitySettings,
    RealRun,
    columns_of_outcomes,
    compare,
    drift_of,
    planned,
    simulate,
    sustainable_rate,
    verdict,
)

SETTINGS = FidelitySettings(requests=30)
TRUE = SimParameters(capacity=8192)


def run_of(parameters: SimParameters, load: float = 0.5) -> RealRun:
    """As if an engine of those parameters had served it."""
    plan = planned(SETTINGS, TRUE, load, 100)
    return RealRun(plan.load, plan.rate, plan.seed, plan.arrivals, simulate(SETTINGS, parameters, plan))


def test_the_right_model_predicts_the_run_itself() -> None:
    run = run_of(TRUE)
    rows = compare(run, simulate(SETTINGS, TRUE, run))
    assert [(row["figure"], row["percentile"]) for row in rows] == [
        (figure, share) for figure in ("prefill_s", "decode_ms", "e2e_s") for share in (50, 99)
    ]
    assert all(row["error"] == 0 and row["within"] for row in rows)
    assert verdict(rows, 0.0, 1.0).startswith("all figures are within the bounds; the same work took 1.00 times")


def test_a_wrong_model_is_found_out() -> None:
    run = run_of(TRUE)
    slower = TRUE.model_copy(update={"decode_step_ns": round(1.5 * TRUE.decode_step_ns)})
    rows = compare(run, simulate(SETTINGS, slower, run))
    decode = next(row for row in rows if (row["figure"], row["percentile"]) == ("decode_ms", 50))
    assert decode["error"] == pytest.approx(0.45, abs=0.1)
    assert not decode["within"]
    said = verdict(rows, 0.4, 1.5)
    assert said.startswith("outside the bounds: ")
    assert "decode_ms P50 at 50%" in said
    assert said.endswith("others used 0.40 cores meanwhile")


def test_bounds_are_on_both_sides_and_wider_at_p99() -> None:
    run = run_of(TRUE)
    faster = TRUE.model_copy(update={"decode_step_ns": round(0.78 * TRUE.decode_step_ns)})
    rows = {(row["figure"], row["percentile"]): row for row in compare(run, simulate(SETTINGS, faster, run))}
    p50, p99 = rows["decode_ms", 50], rows["decode_ms", 99]
    assert (p50["bound"], p99["bound"]) == (0.15, 0.25)
    assert -0.25 < p50["error"] < -0.15
    assert (p50["within"], p99["within"]) == (False, True)


def test_a_rate_is_what_an_instance_keeps_up_with() -> None:
    lengths = planned(SETTINGS, TRUE, 1.0, 100).arrivals
    rate = sustainable_rate(TRUE, lengths)
    twice = TRUE.model_copy(
        update={name: 2 * value for name, value in TRUE.model_dump().items() if name.endswith("_ns")}
    )
    assert sustainable_rate(twice, lengths) == pytest.approx(rate / 2)
    assert planned(SETTINGS, TRUE, 0.5, 100).rate == pytest.approx(rate / 2)
    half = run_of(TRUE, 0.5)
    last_s = max(outcome.last_s or 0.0 for outcome in half.outcomes)
    assert last_s < 1.5 * half.arrivals[-1].arrival_s + 60


def test_quick_runs_are_smaller() -> None:
    assert len(planned(FidelitySettings(quick=True), TRUE, 0.5, 100).arrivals) == 40
    assert len(planned(FidelitySettings(), TRUE, 0.5, 100).arrivals) == 100
    slow = TRUE.model_copy(
        update={name: 20 * value for name, value in TRUE.model_dump().items() if name.endswith("_ns")}
    )
    assert len(planned(FidelitySettings(quick=True), slow, 0.5, 100).arrivals) == 12


def test_raw_samples_hold_every_figure() -> None:
    columns = columns_of_outcomes(run_of(TRUE).outcomes)
    assert columns.keys() == {"arrival_s", "prefill_s", "decode_ms", "e2e_s", "owners"}
    assert all(len(values) == 30 for values in columns.values())
    assert columns["arrival_s"][0] == 0


def test_drift_is_how_much_slower_the_machine_became() -> None:
    def samples(factor: float) -> list[dict[str, Any]]:
        decode = {"pass": 0, "cell": "decode-2x256", "kind": "decode", "requests": 2, "prompt_tokens": 256}
        prefill = {"pass": 0, "cell": "prefill-1x16", "kind": "prefill", "requests": 1, "prompt_tokens": 16}
        return [
            decode | {"steps": [(512, round(40 * factor)), (514, round(42 * factor))]},
            prefill | {"duration_ns": round(1_000 * factor)},
        ]

    assert drift_of(samples(1), samples(1.5)) == pytest.approx(1.5)
    assert drift_of(samples(1), samples(1)) == 1.0
