"""Arrival times."""

import random
from itertools import islice, pairwise
from math import pi
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshift.services.simulation.arrivals import ConstantRate, Rate, SinusoidalRate, arrival_times


def times(rate: Rate, count: int, cv: float = 1.0, seed: int = 0) -> list[float]:
    return list(islice(arrival_times(rate, random.Random(seed), cv), count))


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0, 6.0])
def test_gaps_have_the_mean_and_the_coefficient_of_variation(cv: float) -> None:
    arrivals = times(ConstantRate(5.0), 60_000, cv)
    gaps = [after - before for before, after in pairwise([0.0, *arrivals])]
    assert min(gaps) >= 0
    assert fmean(gaps) == pytest.approx(0.2, rel=0.1)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(cv, rel=0.1)


def test_a_day_has_its_peak_and_its_night() -> None:
    arrivals = times(SinusoidalRate(10.0, 0.8, 100.0), 10_000)
    by_quarter = [sum(int(time % 100 // 25) == quarter for time in arrivals) for quarter in range(4)]
    day, night = by_quarter[0] + by_quarter[1], by_quarter[2] + by_quarter[3]
    assert day / night == pytest.approx((1 + 2 * 0.8 / pi) / (1 - 2 * 0.8 / pi), rel=0.1)
    assert arrivals[-1] == pytest.approx(1000, rel=0.06)


@given(st.floats(0.1, 50), st.floats(0, 0.99), st.floats(1, 1000), st.floats(0, 10_000))
def test_time_of_is_the_inverse(rate: float, swing: float, period_s: float, time_s: float) -> None:
    for source in (ConstantRate(rate), SinusoidalRate(rate, swing, period_s)):
        requests = source.requests_until(time_s)
        assert source.requests_until(source.time_of(requests)) == pytest.approx(requests, rel=1e-6, abs=1e-6)


def test_the_seed_decides() -> None:
    assert times(ConstantRate(1.0), 5, seed=1) == times(ConstantRate(1.0), 5, seed=1)
    assert times(ConstantRate(1.0), 5, seed=1) != times(ConstantRate(1.0), 5, seed=2)


def test_impossible_rates_are_refused() -> None:
    for make in (lambda: ConstantRate(0), lambda: SinusoidalRate(1, 1.0, 10), lambda: SinusoidalRate(1, 0.5, 0)):
        with pytest.raises(ValueError, match="rate"):
            make()
    with pytest.raises(ValueError, match="coefficient"):
        times(ConstantRate(1.0), 1, cv=0)
