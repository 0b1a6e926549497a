"""Fits the simulated engine's timing model (`backends/sim/parameters.py`) to what an instance was measured at. Pure.

The model is linear in its coefficients, none of which may be negative: a step can't become faster by more work. So it
is a nonnegative least-squares problem of three or four unknowns, small enough to try every set of zero coefficients.
Each measurement counts by its relative error: a step of 20 ms that is off by 2 is as wrong as one of 200 off by 20.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from operator import mul
from statistics import median

from meshift.backends.sim.parameters import SimParameters

Row = tuple[float, ...]


class FitError(ValueError):
    """The measurements don't determine the model; the message says which are missing."""


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """A decode step, as it is at some load."""

    requests: int
    tokens: int
    """In the batch, before the step."""
    step_ns: float


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """A prompt of an instance that has nothing else to do, from its submission to its first token."""

    tokens: int
    duration_ns: float


@dataclass(frozen=True, slots=True)
class Fit:
    """Coefficients, and how far the points are from them."""

    coefficients: tuple[float, ...]
    errors: tuple[float, ...]
    """Relative, of each point: (fitted - measured) / measured."""

    @property
    def error_p50(self) -> float:
        """Median of the errors' size."""
        return median(map(abs, self.errors))

    @property
    def error_max(self) -> float:
        """Size of the greatest."""
        return max(map(abs, self.errors))


def fit_decode(points: Sequence[DecodePoint]) -> Fit:
    """`step + request * requests + token * tokens`, and `shared` for more than one request. Raises FitError unless
    batches differ in both."""
    if len({point.requests for point in points}) < 2 or len({point.tokens for point in points}) < 3:
        raise FitError("decode steps need batches of different sizes, and contexts of different lengths")
    rows = [(1.0, float(point.requests), float(point.tokens), float(point.requests > 1)) for point in points]
    return nonnegative_least_squares(rows, [point.step_ns for point in points])


def fit_prefill(points: Sequence[PrefillPoint]) -> Fit:
    """`batch + token * n + token_squared * n * n`. Raises FitError unless there are three lengths."""
    if len({point.tokens for point in points}) < 3:
        raise FitError("prefills need prompts of three lengths at least")
    rows = [(1.0, float(point.tokens), float(point.tokens) ** 2) for point in points]
    return nonnegative_least_squares(rows, [point.duration_ns for point in points])


def fitted_parameters(base: SimParameters, decode: Fit, prefill: Fit) -> SimParameters:
    """`base` with the fitted times, in whole nanoseconds."""
    step, request, token, shared = map(round, decode.coefficients)
    batch, prompt_token, squared = map(round, prefill.coefficients)
    return base.model_copy(
        update={
            "decode_step_ns": max(1, step),
            "decode_request_ns": request,
            "decode_token_ns": token,
            "decode_shared_ns": shared,
            "prefill_batch_ns": max(1, batch),
            "prefill_token_ns": prompt_token,
            "prefill_token_squared_ns": squared,
        }
    )


def nonnegative_least_squares(rows: Sequence[Row], values: Sequence[float]) -> Fit:
    """Least squares of the relative errors over coefficients >= 0; `values` are positive. Raises FitError if the rows
    don't determine any."""
    width = len(rows[0])
    scaled = [[cell / value for cell in row] for row, value in zip(rows, values, strict=True)]
    best: tuple[float, tuple[float, ...]] | None = None
    for size in range(width, 0, -1):
        for columns in combinations(range(width), size):
            solution = _solve_least_squares([[row[index] for index in columns] for row in scaled])
            if solution is None or min(solution) < 0:
                continue
            full = [0.0] * width
            for index, coefficient in zip(columns, solution, strict=True):
                full[index] = coefficient
            loss = sum(error * error for error in _errors(scaled, full))
            if best is None or loss < best[0]:
                best = (loss, tuple(full))
    if best is None:
        raise FitError("the measurements don't determine a model")
    return Fit(best[1], tuple(_errors(scaled, best[1])))


def _errors(scaled: Sequence[Sequence[float]], coefficients: Sequence[float]) -> list[float]:
    return [sum(map(mul, row, coefficients)) - 1.0 for row in scaled]


def _solve_least_squares(rows: Sequence[Sequence[float]]) -> list[float] | None:
    """Coefficients by which all rows come nearest to 1; None if they aren't determined. Columns are brought to one
    size first: those of squares are millions of times the others."""
    width = len(rows[0])
    sizes = [max(abs(row[index]) for row in rows) for index in range(width)]
    if min(sizes) == 0:
        return None
    columns = [[row[index] / sizes[index] for row in rows] for index in range(width)]
    matrix = [[sum(map(mul, left, right)) for right in columns] for left in columns]
    solution = _solve(matrix, [sum(column) for column in columns])
    return None if solution is None else [value / size for value, size in zip(solution, sizes, strict=True)]


SINGULAR = 1e-12
"""A pivot this small beside its row's diagonal is none."""


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Gaussian elimination of a symmetric positive system; None if it is singular."""
    size = len(right)
    rows = [[*line, value] for line, value in zip(matrix, right, strict=True)]
    for index in range(size):
        pivot = rows[index][index]
        if pivot <= SINGULAR * matrix[index][index]:
            return None
        for below in range(index + 1, size):
            factor = rows[below][index] / pivot
            rows[below] = [value - factor * above for value, above in zip(rows[below], rows[index], strict=True)]
    solution = [0.0] * size
    for index in reversed(range(size)):
        known = sum(rows[index][later] * solution[later] for later in range(index + 1, size))
        solution[index] = (rows[index][size] - known) / rows[index][index]
    return solution
