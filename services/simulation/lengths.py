"""Lengths of inputs and outputs, stratified: the quantiles of a distribution, so that every seed has the same multiset.

Without that the seed, and not the policy, decides the tail.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import exp, log
from statistics import NormalDist, fmean

LENGTH_MAX = 6144
"""Longest input and longest output that is generated (Llumnix, section 6.1)."""

ZIPF = {"S": (128, 2.0), "M": (256, 1.5), "L": (512, 1.15)}
"""Mean length, and exponent over the ranks 1 to 2 * mean - 1 that gives it its shape."""

_Z95 = NormalDist().inv_cdf(0.95)
_SIGMA_MAX = 3.0


@dataclass(frozen=True, slots=True)
class Lengths:
    """One kind of request: `inputs(n)` and `outputs(n)` are n quantiles, ascending."""

    inputs: Callable[[int], Sequence[int]]
    outputs: Callable[[int], Sequence[int]]


def zipf_lengths(letter: str, count: int) -> list[int]:
    """The `count` quantiles of one of Llumnix's length distributions. Raises KeyError for an unknown letter."""
    mean, exponent = ZIPF[letter]
    weights = [rank**-exponent for rank in range(1, 2 * mean)]
    total = sum(weights)
    scale = mean * total / sum(rank * weight for rank, weight in enumerate(weights, start=1))
    cumulative = list(accumulate(weight / total for weight in weights))
    cumulative[-1] = 1.0
    ranks = [1 + bisect_left(cumulative, (index + 0.5) / count) for index in range(count)]
    return [min(max(1, round(rank * scale)), LENGTH_MAX) for rank in ranks]


def log_normal_lengths(mean: float, p95: float, count: int) -> list[int]:
    """The `count` quantiles of a log-normal distribution, cut at 1 and `LENGTH_MAX`, with this mean (cut included) and
    this 95th percentile. Raises ValueError if there is none: the mean must be between about a fifth of p95 and it."""
    sigma = _fitting_sigma(mean, p95)
    return _cut(_log_normal(p95, sigma, count))


def _fitting_sigma(mean: float, p95: float) -> float:
    """The mean falls as the spread grows with the percentile held: the first crossing is sought, then halved to."""
    step = 0.05
    low = 0.0
    while _mean(p95, low + step) > mean:
        low += step
        if low > _SIGMA_MAX:
            raise ValueError(f"no log-normal distribution has a mean of {mean} and a 95th percentile of {p95}")
    high = low + step
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _mean(p95, middle) > mean else (low, middle)
    return high


def _mean(p95: float, sigma: float) -> float:
    return fmean(min(value, LENGTH_MAX) for value in _log_normal(p95, sigma, 2_000))


def _log_normal(p95: float, sigma: float, count: int) -> list[float]:
    normal = NormalDist(log(p95) - _Z95 * sigma, sigma or 1e-9)
    return [exp(normal.inv_cdf((index + 0.5) / count)) for index in range(count)]


def _cut(values: Sequence[float]) -> list[int]:
    return [min(max(1, round(value)), LENGTH_MAX) for value in values]


def _zipf(letter: str) -> Callable[[int], list[int]]:
    return lambda count: zipf_lengths(letter, count)


def _log(mean: float, p95: float) -> Callable[[int], list[int]]:
    return lambda count: log_normal_lengths(mean, p95, count)


GENERATED: Mapping[str, Lengths] = {
    **{
        f"{first}-{second}": Lengths(_zipf(first), _zipf(second))
        for first, second in ("SS", "MM", "LL", "SL", "LS", "SM", "MS", "ML", "LM")
    },
    "sharegpt": Lengths(_log(306, 1484), _log(500, 988)),
    "burstgpt": Lengths(_log(830, 2345), _log(271, 669)),
}
"""By name: Llumnix's (inputs-outputs), and two that have the means and 95th percentiles of real conversations."""
