"""Requests for a simulation: lengths from a generator or a trace, in an order and at times that the seed decides."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeVar

from meshift.services.simulation.arrivals import ConstantRate, Rate, arrival_times
from meshift.services.simulation.lengths import GENERATED, zipf_lengths
from meshift.services.simulation.traces import TraceRow

__all__ = ["Arrival", "fitting", "from_rows", "generate", "pattern_shift", "replay", "with_priorities", "zipf_lengths"]

ItemT = TypeVar("ItemT")

PATTERN_SHIFT = ((512, 16), (128, 512))
"""Input and output tokens in the first and the second half of PipeLive's trace (section 6.1)."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a workload."""

    request_id: str
    arrival_s: float
    input_tokens: int
    output_tokens: int
    priority: int = 0
    """Scheduling and execution priority."""


def generate(trace: str, count: int, rate: float | Rate, seed: int, cv: float = 1.0) -> list[Arrival]:
    """`count` requests of a generated trace (`S-S`, `sharegpt`, ...) at `rate` requests/s. Raises KeyError for an
    unknown one."""
    lengths = GENERATED[trace]
    rng = random.Random(f"{trace}/{seed}")
    inputs = _shuffled(lengths.inputs(count), rng)
    outputs = _shuffled(lengths.outputs(count), rng)
    return _arrive(list(zip(inputs, outputs, strict=True)), rate, rng, cv)


def from_rows(rows: Sequence[TraceRow], count: int, rate: float | Rate, seed: int, cv: float = 1.0) -> list[Arrival]:
    """`count` requests with a trace's lengths, pairs kept: evenly spread over the trace's own order of total length,
    so that every seed has the same multiset, in an order and at times of the seed."""
    ordered = sorted(rows, key=lambda row: (row.input_tokens + row.output_tokens, row.input_tokens))
    chosen = [ordered[int((index + 0.5) * len(ordered) / count)] for index in range(count)]
    rng = random.Random(f"rows/{seed}")
    pairs = _shuffled([(row.input_tokens, row.output_tokens) for row in chosen], rng)
    return _arrive(pairs, rate, rng, cv)


def replay(rows: Sequence[TraceRow], count: int, rate: float | None = None) -> list[Arrival]:
    """The first `count` requests of a trace with times, as they came, or with all gaps scaled to a mean `rate`.
    Raises ValueError if it has no times."""
    chosen = rows[:count]
    times = [row.arrival_s for row in chosen if row.arrival_s is not None]
    if len(times) != len(chosen):
        raise ValueError("the trace has no times: a rate is needed")
    scale = 1.0 if rate is None or not times[-1] else len(times) / rate / times[-1]
    return [
        Arrival(f"r{index}", arrival_s * scale, row.input_tokens, row.output_tokens)
        for index, (arrival_s, row) in enumerate(zip(times, chosen, strict=True))
    ]


def pattern_shift(count: int, rate: float, seed: int) -> list[Arrival]:
    """PipeLive's trace: prefill-heavy first, decode-heavy then."""
    rng = random.Random(f"pattern/{seed}")
    pairs = [PATTERN_SHIFT[2 * index >= count] for index in range(count)]
    return _arrive(pairs, rate, rng, 1.0)


def with_priorities(arrivals: Sequence[Arrival], shares: Mapping[int, float], seed: int) -> list[Arrival]:
    """The same requests, of which these shares (by priority) are chosen by the seed; the rest keep theirs. Stratified:
    of n requests exactly `round(share * n)` have the priority. Raises ValueError if the shares exceed 1."""
    if sum(shares.values()) > 1 + 1e-9 or min(shares.values(), default=0.0) < 0:
        raise ValueError(f"shares {dict(shares)} are not parts of a whole")
    order = _shuffled(range(len(arrivals)), random.Random(f"priorities/{seed}"))
    result, start = list(arrivals), 0
    for priority, share in shares.items():
        end = min(len(order), start + round(share * len(arrivals)))
        for index in order[start:end]:
            result[index] = replace(result[index], priority=priority)
        start = end
    return result


def fitting(arrivals: Sequence[Arrival], tokens_max: int) -> list[Arrival]:
    """Those that an instance of `tokens_max` tokens can hold to their end; the others would be refused."""
    return [arrival for arrival in arrivals if arrival.input_tokens + arrival.output_tokens <= tokens_max]


def _arrive(pairs: Sequence[tuple[int, int]], rate: float | Rate, rng: random.Random, cv: float) -> list[Arrival]:
    source = ConstantRate(rate) if isinstance(rate, (int, float)) else rate
    times = islice(arrival_times(source, rng, cv), len(pairs))
    return [
        Arrival(f"r{index}", arrival_s, inputs, outputs)
        for index, (arrival_s, (inputs, outputs)) in enumerate(zip(times, pairs, strict=True))
    ]


def _shuffled(values: Sequence[ItemT], rng: random.Random) -> list[ItemT]:
    copy = list(values)
    rng.shuffle(copy)
    return copy
