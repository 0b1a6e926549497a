"""When requests arrive: independent, bursty, at a constant rate or one that changes with the time of day."""

import random
from collections.abc import Iterator
from math import cos, pi
from typing import Protocol


class Rate(Protocol):
    """Requests a second over time."""

    def requests_until(self, time_s: float) -> float:
        """Expected requests in [0, time_s); grows without end."""

    def time_of(self, requests: float) -> float:
        """When that many are expected: the inverse."""


class ConstantRate:
    """The same at all times."""

    def __init__(self, rate: float) -> None:
        if rate <= 0:
            raise ValueError(f"a rate of {rate} requests/s never sends any")
        self._rate = rate

    def requests_until(self, time_s: float) -> float:
        """Expected requests."""
        return self._rate * time_s

    def time_of(self, requests: float) -> float:
        """The inverse."""
        return requests / self._rate


class SinusoidalRate:
    """`rate * (1 + swing * sin(2 pi t / period_s))`, with a swing in [0, 1): a day with its peak and its night."""

    def __init__(self, rate: float, swing: float, period_s: float) -> None:
        if rate <= 0 or not 0 <= swing < 1 or period_s <= 0:
            raise ValueError(f"rate {rate}, swing {swing}, period {period_s} s")
        self._rate, self._swing, self._period_s = rate, swing, period_s

    def requests_until(self, time_s: float) -> float:
        """Expected requests."""
        turn = 2 * pi / self._period_s
        return self._rate * (time_s + self._swing * (1 - cos(turn * time_s)) / turn)

    def time_of(self, requests: float) -> float:
        """The inverse, by halving: the swing shifts a time by a third of a period at most."""
        low = max(0.0, requests / self._rate - self._period_s)
        high = requests / self._rate
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self.requests_until(middle) < requests else (low, middle)
        return high


def arrival_times(rate: Rate, rng: random.Random, cv: float = 1.0) -> Iterator[float]:
    """Seconds, ascending, without end. Gaps are gamma distributed with that coefficient of variation (1: a Poisson
    process) in the time in which the rate is 1."""
    if cv <= 0:
        raise ValueError(f"a coefficient of variation of {cv} is none")
    shape = 1 / (cv * cv)
    requests = 0.0
    while True:
        requests += rng.expovariate(1.0) if cv == 1.0 else rng.gammavariate(shape, 1 / shape)
        yield rate.time_of(requests)
