"""A histogram that costs a bisection an observation and knows nothing of who reads it."""

from bisect import bisect_left
from collections.abc import Iterator

LATENCY_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Of what a client waits for: a first token."""

DURATION_BOUNDS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Of whole requests."""

TOKEN_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 5.0)
"""Of the time from one token to the next."""

DECISION_BOUNDS_S = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05)
"""Of a decision of the scheduler: microseconds."""


class Histogram:
    """Counts by upper bound (inclusive, ascending), in seconds; what is above all of them goes to `+Inf`."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """The same value so many times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        """Observations."""
        return sum(self._counts)

    def buckets(self) -> Iterator[tuple[str, int]]:
        """`(upper bound, observations up to it)`, cumulated, `+Inf` last."""
        seen = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            seen += count
            yield bound, seen
