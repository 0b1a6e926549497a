"""Workloads."""

from collections import Counter

import pytest

from meshift.services.simulation.arrivals import SinusoidalRate
from meshift.services.simulation.traces import TraceRow
from meshift.services.simulation.workload import (
    Arrival,
    fitting,
    from_rows,
    generate,
    pattern_shift,
    replay,
    with_priorities,
)

ROWS = [TraceRow(float(second), 10 * second + 1, second + 1) for second in range(100)]


def lengths(arrivals: list[Arrival]) -> Counter[tuple[int, int]]:
    return Counter((arrival.input_tokens, arrival.output_tokens) for arrival in arrivals)


@pytest.mark.parametrize("trace", ["M-M", "burstgpt"])
def test_every_seed_has_the_same_lengths_in_its_own_order(trace: str) -> None:
    one, other = generate(trace, 500, 5.0, 1), generate(trace, 500, 5.0, 2)
    assert one == generate(trace, 500, 5.0, 1)
    for column in ("input_tokens", "output_tokens"):
        first, second = ([getattr(arrival, column) for arrival in run] for run in (one, other))
        assert first != second
        assert sorted(first) == sorted(second)
    times = [arrival.arrival_s for arrival in one]
    assert times == sorted(times)


def test_a_changing_rate_and_bursts_are_taken() -> None:
    assert len(generate("S-S", 100, SinusoidalRate(5.0, 0.5, 10.0), 1, cv=4.0)) == 100


def test_of_a_file_the_pairs_are_kept_and_the_seed_decides_the_rest() -> None:
    one, other = from_rows(ROWS, 20, 2.0, 1), from_rows(ROWS, 20, 2.0, 2)
    assert lengths(one) == lengths(other)
    assert lengths(one).keys() <= {(row.input_tokens, row.output_tokens) for row in ROWS}
    assert [arrival.arrival_s for arrival in one] != [arrival.arrival_s for arrival in other]
    assert sum(lengths(from_rows(ROWS, 300, 2.0, 1)).values()) == 300, "more than there are: repeated"


def test_a_replay_keeps_the_gaps_or_scales_them() -> None:
    assert [arrival.arrival_s for arrival in replay(ROWS, 3)] == [0.0, 1.0, 2.0]
    assert [arrival.arrival_s for arrival in replay(ROWS, 3, rate=3.0)] == [0.0, 0.5, 1.0]
    with pytest.raises(ValueError, match="no times"):
        replay([TraceRow(None, 1, 1)], 1)


def test_the_pattern_shifts_half_way() -> None:
    arrivals = pattern_shift(200, 4.0, 0)
    assert [(arrival.input_tokens, arrival.output_tokens) for arrival in arrivals] == [(512, 16)] * 100 + [
        (128, 512)
    ] * 100


def test_shares_of_priorities_are_exact() -> None:
    arrivals = with_priorities(generate("S-S", 100, 1.0, 0), {1: 0.1, 2: 0.3}, seed=5)
    assert Counter(arrival.priority for arrival in arrivals) == {0: 60, 1: 10, 2: 30}
    assert arrivals == with_priorities(generate("S-S", 100, 1.0, 0), {1: 0.1, 2: 0.3}, seed=5)
    for shares in ({1: 0.7, 2: 0.4}, {1: -0.1}):
        with pytest.raises(ValueError, match="whole"):
            with_priorities(arrivals, shares, seed=5)


def test_what_fits_into_no_instance_is_left_out() -> None:
    arrivals = [Arrival("a", 0, 90, 10), Arrival("b", 1, 90, 11)]
    assert fitting(arrivals, 100) == arrivals[:1]
