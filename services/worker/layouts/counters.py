"""What a worker counts of changes of its layout. Plain numbers, as in `meshift.services.worker.counters`."""

from dataclasses import dataclass, field

from meshift.tracing.histogram import LATENCY_BOUNDS_S, Histogram

NO_REFUSAL = "none"


@dataclass(slots=True)
class LayoutCounters:
    """Since the start."""

    ended: dict[tuple[str, str], int] = field(default_factory=dict)
    """By outcome (`committed`, `aborted`) and refusal (`none`)."""
    byte_count: int = 0
    """Of KV that was copied between stages."""
    rounds: int = 0
    durations: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS_S))
    """Of those that were committed, from the begin."""
    stops: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS_S))
    """Of the stage that was held back longest."""

    def settled(self, outcome: str, refusal: str | None) -> None:
        """One has ended."""
        name = (outcome, refusal or NO_REFUSAL)
        self.ended[name] = self.ended.get(name, 0) + 1
