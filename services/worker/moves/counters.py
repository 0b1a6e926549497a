"""What a worker counts of moves. Plain numbers, as in `meshift.services.worker.counters`."""

from dataclasses import dataclass, field

from meshift.schemas.moves import MoveFigures, MoveMode, MoveOutcome, MoveRefusal
from meshift.tracing.histogram import LATENCY_BOUNDS_S, Histogram

NO_REFUSAL = "none"


@dataclass(slots=True)
class MoveCounters:
    """Since the start. Of moves out of this instance, unless said."""

    ended: dict[tuple[str, str, str], int] = field(default_factory=dict)
    """By mode, outcome and refusal (`none`)."""
    arrived: dict[str, int] = field(default_factory=dict)
    """Moves into this instance, by `committed` or `aborted`."""
    byte_count: int = 0
    tokens: int = 0
    rounds: int = 0
    durations: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS_S))
    """Of those that moved."""
    frozen: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS_S))
    """From the last step here to runnable there."""

    def settled(self, mode: MoveMode, outcome: MoveOutcome, refusal: MoveRefusal | None, figures: MoveFigures) -> None:
        """A move has ended."""
        name = (mode.value, outcome.value, NO_REFUSAL if refusal is None else refusal.value)
        self.ended[name] = self.ended.get(name, 0) + 1
        self.byte_count += figures.byte_count
        self.tokens += figures.tokens
        self.rounds += figures.rounds
        if outcome is MoveOutcome.MOVED:
            self.durations.observe(figures.duration_ns / 1e9)
            if figures.frozen_ns:
                self.frozen.observe(figures.frozen_ns / 1e9)

    def arrival(self, outcome: str) -> None:
        """A move into this instance has ended."""
        self.arrived[outcome] = self.arrived.get(outcome, 0) + 1
