"""Takes the measurements of a plan, and makes a calibration of them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from meshift.backends.sim.parameters import SimParameters
from meshift.services.calibration.file import Calibration, FitQuality
from meshift.services.calibration.fit import DecodePoint, PrefillPoint, fit_decode, fit_prefill, fitted_parameters
from meshift.services.calibration.growth import StepGrowth
from meshift.services.calibration.plan import SETTLE_STEPS, Cell, output_tokens
from meshift.services.calibration.probe import InstanceProbe, ProbeError, step_gaps
from meshift.services.calibration.targets import LoadPoint, Target, priority_classes

Sample = dict[str, Any]
"""A measurement as it is kept: JSON."""

LENGTHS = (1, 2, 4)
"""Outputs are so many times longer where the first request had ended before the last one began: on a busy machine."""

FULL_STEP_TIMES_MIN, FULL_STEP_TIMES_MAX = 1.01, 100.0
"""Steps that don't grow at all would let priorities cost nothing."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured."""

    model: str
    engine: str
    capacity: int
    page_size: int
    request_tokens: int
    percentile: float


async def warm_up(probe: InstanceProbe, request_tokens: int) -> None:
    """Let the engine compile and allocate what it does once."""
    await probe.until_idle()
    await probe.generate(2, request_tokens, 8)


async def measure(
    probe: InstanceProbe,
    cells: Iterable[tuple[int, Cell]],
    known: Sequence[Sample],
    keep: Callable[[Sample], None],
) -> list[Sample]:
    """All samples, `known` ones and those that were missing; each new one is kept at once. Raises ProbeError."""
    samples = list(known)
    done = {(sample["pass"], sample["cell"]) for sample in known}
    for number, cell in cells:
        if (number, cell.name) not in done:
            sample = await _measure_cell(probe, number, cell)
            keep(sample)
            samples.append(sample)
    return samples


async def _measure_cell(probe: InstanceProbe, number: int, cell: Cell) -> Sample:
    sample: Sample = {
        "pass": number,
        "cell": cell.name,
        "kind": cell.kind,
        "requests": cell.requests,
        "prompt_tokens": cell.prompt_tokens,
    }
    for factor in LENGTHS:
        await probe.until_idle()
        requests = await probe.generate(cell.requests, cell.prompt_tokens, factor * output_tokens(cell))
        if cell.kind == "prefill":
            return {**sample, "duration_ns": round(1e9 * (requests[0].first_s - requests[0].submitted_s))}
        if gaps := step_gaps(requests, SETTLE_STEPS):
            return {**sample, "steps": gaps}
    raise ProbeError(f"{cell.requests} requests of {cell.prompt_tokens} tokens never ran at once")


def evaluate(samples: Sequence[Sample], subject: Subject, targets: Sequence[Target]) -> Calibration:
    """Fit, and find the target loads. Raises FitError, TargetError."""
    decode, prefill = fit_decode(decode_points(samples)), fit_prefill(prefill_points(samples))
    base = SimParameters(capacity=subject.capacity, page_size=subject.page_size)
    loads = load_points(samples, subject.request_tokens, subject.percentile)
    usage, limits = priority_classes(targets, loads)
    parameters = fitted_parameters(base, decode, prefill)
    return Calibration(
        model=subject.model,
        engine=subject.engine,
        capacity=subject.capacity,
        request_tokens=subject.request_tokens,
        percentile=subject.percentile,
        parameters=parameters,
        virtual_usage=usage,
        limits_ms=limits,
        loads=tuple((point.tokens, point.latency_ms) for point in loads),
        quality=FitQuality(
            decode_error_p50=decode.error_p50,
            decode_error_max=decode.error_max,
            prefill_error_p50=prefill.error_p50,
            prefill_error_max=prefill.error_max,
        ),
        step_growth=step_growth(parameters, subject.request_tokens),
    )


def step_growth(parameters: SimParameters, request_tokens: int) -> StepGrowth:
    """Of the fitted model: how many times as long a step takes at full memory, with requests of that many tokens, as
    with one of them; and how many tokens are as much work for a step as one request more."""
    cost, capacity = parameters.step_cost(copying=False), parameters.capacity
    full = cost.step_ns(max(1.0, capacity / request_tokens), float(capacity))
    alone = cost.step_ns(1.0, float(request_tokens))
    return StepGrowth(
        full_step_times=round(min(max(full / alone, FULL_STEP_TIMES_MIN), FULL_STEP_TIMES_MAX), 3),
        # Where tokens cost nothing, requests are all that counts: one more weighs as much as all of the memory.
        request_tokens=round(min(cost.request / max(cost.token, 1), float(capacity)), 1),
    )


def decode_points(samples: Sequence[Sample]) -> list[DecodePoint]:
    """The median step of each measurement's steps, all passes together."""
    return [
        DecodePoint(members[0]["requests"], round(fmean(step[0] for step in steps)), median(step[1] for step in steps))
        for members, steps in _decodes(samples).values()
    ]


def prefill_points(samples: Sequence[Sample]) -> list[PrefillPoint]:
    """The median of each prompt's passes."""
    by_cell = _by_cell(sample for sample in samples if sample["kind"] == "prefill")
    return [
        PrefillPoint(members[0]["prompt_tokens"], median(sample["duration_ns"] for sample in members))
        for members in by_cell.values()
    ]


def load_points(samples: Sequence[Sample], request_tokens: int, percentile: float) -> list[LoadPoint]:
    """What a token takes at each load of typical requests."""
    typical = [sample for sample in samples if sample["prompt_tokens"] == request_tokens]
    return [
        LoadPoint(round(fmean(step[0] for step in steps)), _percentile([step[1] for step in steps], percentile) / 1e6)
        for _, steps in _decodes(typical).values()
    ]


def _decodes(samples: Sequence[Sample]) -> Mapping[str, tuple[list[Sample], list[tuple[int, int]]]]:
    by_cell = _by_cell(sample for sample in samples if sample["kind"] == "decode")
    return {
        name: (members, [step for sample in members for step in sample["steps"]]) for name, members in by_cell.items()
    }


def _by_cell(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    cells: dict[str, list[Sample]] = {}
    for sample in samples:
        cells.setdefault(sample["cell"], []).append(sample)
    return cells


def _percentile(values: Sequence[int], percentile: float) -> float:
    """The mean of the two in the middle for 50, else by nearest rank."""
    if percentile == 50.0:
        return float(median(values))
    ordered = sorted(values)
    return float(ordered[min(len(ordered) - 1, int(len(ordered) * percentile / 100))])
