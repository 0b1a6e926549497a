"""What a coordinator counts. Plain numbers."""

from dataclasses import dataclass, field

from meshift.schemas.reconfiguring import ReconfigureReport
from meshift.tracing.histogram import LATENCY_BOUNDS_S, Histogram

NO_REFUSAL = "none"


@dataclass(slots=True)
class CoordinatorCounters:
    """Since the start."""

    ended: dict[tuple[str, ...], float] = field(default_factory=dict)
    """By outcome and refusal (`none`)."""
    adopted: int = 0
    """Changes that were under way before."""
    phases: dict[str, Histogram] = field(default_factory=dict)
    """How long each phase took, of those that were committed."""

    def settled(self, report: ReconfigureReport) -> None:
        """One has ended."""
        outcome = "" if report.outcome is None else report.outcome.value
        name: tuple[str, ...] = (outcome, NO_REFUSAL if report.refusal is None else report.refusal.value)
        self.ended[name] = self.ended.get(name, 0) + 1
        if outcome == "committed":
            for phase, took_s in report.phases_s.items():
                self.phases.setdefault(phase, Histogram(LATENCY_BOUNDS_S)).observe(took_s)
