"""What moves cost the requests that stay: paired windows with and without a move under way. Pure, from raw samples.

- `window`: `pair`, `kind` (`quiet` or `move`), `source` and `destination` of the pair's move, `begin_ns`, `end_ns`.
- `step`: of one instance: `instance`, `emitted_ns`, `cpu_ns` of its step thread so far, `names` of the streams in it.

A pair compares like with like: steps of the source with the mover in its batch, and steps of the destination without,
both while the move is under way and in the quiet window just before it.
"""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby, pairwise
from typing import Any

from meshift.benchmarks.move_figures import Sample, SamplesError, of_measure

QUIET, MOVE = "quiet", "move"
STEPS_MIN = 3
"""In each half of a pair, for it to count."""

RESAMPLES = 10_000


@dataclass(frozen=True)
class StepCost:
    """Of one step."""

    wall_ns: int
    cpu_ns: int


@dataclass(frozen=True)
class Pair:
    """The steps of one instance in both halves of a pair."""

    number: int
    side: str
    """`source` or `destination`."""
    quiet: Sequence[StepCost]
    move: Sequence[StepCost]

    @property
    def step_ratio(self) -> float:
        """Medians of step times, with a move under way over without."""
        with_move, without = ([step.wall_ns for step in steps] for steps in (self.move, self.quiet))
        return statistics.median(with_move) / statistics.median(without)

    @property
    def mean_ratio(self) -> float:
        """The same of means, in which few slow steps count too."""
        with_move, without = ([step.wall_ns for step in steps] for steps in (self.move, self.quiet))
        return statistics.fmean(with_move) / statistics.fmean(without)

    @property
    def cpu_ratio(self) -> float:
        """CPU time of the step thread for a step, with over without. Of means: a copy burdens some steps only."""
        with_move, without = ([step.cpu_ns for step in steps] for steps in (self.move, self.quiet))
        return statistics.fmean(with_move) / statistics.fmean(without)


def pairs_of(samples: Sequence[Sample]) -> list[Pair]:
    """All pairs that have steps enough, the source's before the destination's. Raises SamplesError if none has."""
    windows = {(window["pair"], window["kind"]): window for window in of_measure(samples, "window")}
    by_instance: dict[str, list[Sample]] = {}
    for step in of_measure(samples, "step"):
        by_instance.setdefault(step["instance"], []).append(step)
    found = []
    for number in sorted({pair for pair, _ in windows}):
        halves = windows[number, QUIET], windows[number, MOVE]
        for side in ("source", "destination"):
            steps = by_instance.get(halves[0][side], [])
            quiet, move = (_costs(steps, window, with_mover=side == "source") for window in halves)
            if min(len(quiet), len(move)) >= STEPS_MIN:
                found.append(Pair(number, side, quiet, move))
    if not found:
        raise SamplesError("no pair of windows has steps enough")
    return found


def _costs(steps: Sequence[Sample], window: Sample, *, with_mover: bool) -> list[StepCost]:
    """Of steps that follow one another inside a window, with the same streams in them."""

    def belongs(step: Sample) -> bool:
        inside = window["begin_ns"] <= step["emitted_ns"] <= window["end_ns"]
        return bool(inside and (window["mover"] in step["names"]) is with_mover)

    return [
        StepCost(later["emitted_ns"] - earlier["emitted_ns"], later["cpu_ns"] - earlier["cpu_ns"])
        for earlier, later in pairwise(steps)
        if belongs(earlier) and belongs(later)
    ]


def co_located(samples: Sequence[Sample], seed: int = 0) -> dict[str, Any]:
    """The figures: medians over pairs, and where 95% of resampled medians of the step times' ratio lie."""
    pairs = pairs_of(samples)
    # Both instances of a pair had the same disturbances: they are drawn together.
    together = [[pair.step_ratio for pair in group] for _, group in groupby(pairs, key=lambda pair: pair.number)]
    low, high = bootstrap(together, random.Random(seed))
    return {
        "steps_ratio_paired": round(statistics.median(pair.step_ratio for pair in pairs), 4),
        "ci95": [round(low, 4), round(high, 4)],
        "step_thread_cpu_ratio": round(statistics.median(pair.cpu_ratio for pair in pairs), 4),
    }


def bootstrap(groups: Sequence[Sequence[float]], chance: random.Random) -> tuple[float, float]:
    """The middle 95% of the medians of resampled groups of values."""
    draws = (chance.choices(groups, k=len(groups)) for _ in range(RESAMPLES))
    medians = sorted(statistics.median(chain.from_iterable(draw)) for draw in draws)
    return medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES) - 1]


def by_side(samples: Sequence[Sample]) -> dict[str, tuple[float, float, float]]:
    """For each side, medians over its pairs: of step times, of mean step times, of CPU time of the step thread."""
    pairs = pairs_of(samples)
    sides = sorted({pair.side for pair in pairs}, reverse=True)
    return {side: _medians([pair for pair in pairs if pair.side == side]) for side in sides}


def _medians(pairs: Sequence[Pair]) -> tuple[float, float, float]:
    return (
        statistics.median(pair.step_ratio for pair in pairs),
        statistics.median(pair.mean_ratio for pair in pairs),
        statistics.median(pair.cpu_ratio for pair in pairs),
    )
