"""What a scheduler counts. Plain numbers: whoever wants them (`metrics.py`) reads them when asked."""

from dataclasses import dataclass, field
from functools import partial

from meshift.tracing.histogram import DECISION_BOUNDS_S, Histogram

FITS = "fits"
WAITS = "waits"
HELD = "held"


@dataclass(slots=True)
class SchedulerCounters:
    """Since the start."""

    dispatches: dict[str, int] = field(default_factory=dict)
    """By decision: `fits`, `waits` (for room, there), `held` (told to ask again), or the code of the refusal."""
    pairs: int = 0
    """Sources told to give requests to a destination."""
    scalings: dict[str, int] = field(default_factory=dict)
    """By action: `start`, `drain`, or with `dry_` before it where it was only said."""
    scaling_failures: int = 0
    """Orders that launchers or instances refused or didn't answer."""
    duration: Histogram = field(default_factory=partial(Histogram, DECISION_BOUNDS_S))

    def decided(self, decision: str, duration_s: float) -> None:
        """A dispatch was answered."""
        self.dispatches[decision] = self.dispatches.get(decision, 0) + 1
        self.duration.observe(duration_s)

    def scaled(self, action: str, dry_run: bool) -> None:
        """An instance was to be started or drained."""
        name = f"dry_{action}" if dry_run else str(action)
        self.scalings[name] = self.scalings.get(name, 0) + 1
