"""Whether, and when, a service that ended is started again. Pure."""

from collections.abc import Callable
from dataclasses import dataclass

RESTART_DELAY_S_FIRST = 0.5
RESTART_DELAY_FACTOR = 2.0
RESTART_DELAY_S_MAX = 30.0

RESTARTS_IN_VAIN_MAX = 8
"""Restarts in a row after which none was ready for `HEALTHY_AFTER_S`: no further one is tried."""

HEALTHY_AFTER_S = 30.0
"""Ready for so long, a service has shown that it works: earlier failures are forgotten."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What is known when a process ended without being asked to."""

    exit_status: int
    """Negative: the signal that killed it."""
    ever_ready: bool
    """Whether this or an earlier process of the service has been ready."""
    ready_s: float
    """How long this process has been ready."""
    failures: int
    """Ends in a row before this one, as counted by `Restart`."""


@dataclass(frozen=True, slots=True)
class Restart:
    """Start it again after `delay_s`."""

    delay_s: float
    failures: int
    """To hand in at the next end."""


@dataclass(frozen=True, slots=True)
class Leave:
    """It ended well, of its own accord (a drain that somebody asked for): let it be."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Don't start it again."""

    reason: str


RESTART_ASKED_STATUS = 75
"""Of a service that ended well and wants to be started again; `meshift.services.process.EXIT_RESTART`."""

Decision = Restart | Leave | GiveUp
RestartPolicy = Callable[[Ended], Decision]


def decide_restart(ended: Ended) -> Decision:
    """What to do about a service that ended. One that has never been ready is not tried again: its settings or its
    machine are wrong, and its log says more than a second try."""
    if ended.exit_status == 0:
        return Leave()
    if ended.exit_status == RESTART_ASKED_STATUS and ended.ever_ready:
        return Restart(0.0, failures=0)
    if not ended.ever_ready:
        return GiveUp("it did not start")
    failures = 0 if ended.ready_s >= HEALTHY_AFTER_S else ended.failures
    if failures >= RESTARTS_IN_VAIN_MAX:
        return GiveUp(f"{failures} restarts did not help")
    delay_s = RESTART_DELAY_S_FIRST * RESTART_DELAY_FACTOR**failures
    return Restart(min(delay_s, RESTART_DELAY_S_MAX), failures + 1)
