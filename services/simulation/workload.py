"""Requests for a simulation: Llumnix's generated lengths (section 6.1), stratified, and Poisson arrivals.

Stratified: every seed has the same multiset of lengths, the quantiles of the distribution, in an order of its own.
Without that the seed, and not the policy, decides the tail.
"""

import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

LENGTH_MAX = 6144

ZIPF = {"S": (128, 2.0), "M": (256, 1.5), "L": (512, 1.15)}
"""Mean length, and exponent over the ranks 1 to 2 * mean - 1 that gives it its shape."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a workload."""

    request_id: str
    arrival_s: float
    input_tokens: int
    output_tokens: int


def zipf_lengths(letter: str, count: int) -> list[int]:
    """The `count` quantiles of a length distribution, ascending. Raises KeyError for an unknown letter."""
    mean, exponent = ZIPF[letter]
    weights = [rank**-exponent for rank in range(1, 2 * mean)]
    total = sum(weights)
    scale = mean * total / sum(rank * weight for rank, weight in enumerate(weights, start=1))
    cumulative = list(accumulate(weight / total for weight in weights))
    cumulative[-1] = 1.0
    ranks = [1 + bisect_left(cumulative, (index + 0.5) / count) for index in range(count)]
    return [min(max(1, round(rank * scale)), LENGTH_MAX) for rank in ranks]


def generate(trace: str, count: int, rate: float, seed: int) -> list[Arrival]:
    """`count` requests of a trace such as `S-S` or `L-S` (inputs-outputs) at `rate` requests/s."""
    input_letter, output_letter = trace.split("-")
    rng = random.Random(f"{trace}/{seed}")
    inputs = _shuffled(zipf_lengths(input_letter, count), rng)
    outputs = _shuffled(zipf_lengths(output_letter, count), rng)
    arrival_s = 0.0
    arrivals = []
    for index in range(count):
        arrival_s += rng.expovariate(rate)
        arrivals.append(Arrival(f"r{index}", arrival_s, inputs[index], outputs[index]))
    return arrivals


def _shuffled(values: Sequence[int], rng: random.Random) -> list[int]:
    copy = list(values)
    rng.shuffle(copy)
    return copy
