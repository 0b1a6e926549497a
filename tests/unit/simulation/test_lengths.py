"""Generated lengths."""

import pytest

from meshift.services.simulation.lengths import GENERATED, LENGTH_MAX, log_normal_lengths, zipf_lengths

PERCENTILES = {
    "S": (34, 101, 403, 1778),
    "M": (30, 161, 1272, 4679),
    "L": (55, 600, 3131, 5371),
}
"""P50, P80, P95, P99 of Llumnix's distributions as they were derived from its text."""


def at(values: list[int], share: float) -> int:
    return values[int(len(values) * share)]


@pytest.mark.parametrize(("letter", "mean"), [("S", 128), ("M", 256), ("L", 512)])
def test_zipf_has_the_paper_s_mean_and_percentiles(letter: str, mean: int) -> None:
    values = zipf_lengths(letter, 10_000)
    assert values == sorted(values)
    assert sum(values) / len(values) == pytest.approx(mean, rel=0.02)
    found = [at(values, share) for share in (0.5, 0.8, 0.95, 0.99)]
    assert found == pytest.approx(PERCENTILES[letter], rel=0.06)


@pytest.mark.parametrize(
    ("name", "mean_in", "p95_in", "mean_out", "p95_out"),
    [("sharegpt", 306, 1484, 500, 988), ("burstgpt", 830, 2345, 271, 669)],
)
def test_conversations_have_their_means_and_percentiles(
    name: str, mean_in: int, p95_in: int, mean_out: int, p95_out: int
) -> None:
    for values, mean, p95 in (
        (list(GENERATED[name].inputs(10_000)), mean_in, p95_in),
        (list(GENERATED[name].outputs(10_000)), mean_out, p95_out),
    ):
        assert sum(values) / len(values) == pytest.approx(mean, rel=0.01)
        assert at(values, 0.95) == pytest.approx(p95, rel=0.01)
        assert values[0] >= 1
        assert values[-1] <= LENGTH_MAX


def test_what_no_log_normal_has_is_refused() -> None:
    with pytest.raises(ValueError, match="no log-normal"):
        log_normal_lengths(10, 5000, 100)
    with pytest.raises(KeyError):
        zipf_lengths("X", 10)
