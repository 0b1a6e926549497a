"""What a frontend counts. Plain numbers: whoever wants them (`metrics.py`) reads them when asked."""

from dataclasses import dataclass, field
from functools import partial

from meshift.services.frontend.streams import Stream
from meshift.tracing.histogram import DURATION_BOUNDS_S, LATENCY_BOUNDS_S, TOKEN_BOUNDS_S, Histogram


@dataclass(slots=True)
class FrontendCounters:
    """Since the start. Times are of the loop's clock."""

    time_to_first_token: Histogram = field(default_factory=partial(Histogram, LATENCY_BOUNDS_S))
    inter_token: Histogram = field(default_factory=partial(Histogram, TOKEN_BOUNDS_S))
    time_per_output_token: Histogram = field(default_factory=partial(Histogram, TOKEN_BOUNDS_S))
    request_duration: Histogram = field(default_factory=partial(Histogram, DURATION_BOUNDS_S))
    ended: dict[str, int] = field(default_factory=dict)
    """By finish reason, or how else it ended."""
    input_tokens: int = 0
    output_tokens: int = 0
    resumes: int = 0
    stale_events: int = 0
    asks_answered: int = 0
    asks_failed: int = 0
    placed_by_scheduler: int = 0
    placed_in_bypass: int = 0

    def grown(self, stream: Stream, now_s: float) -> None:
        """A stream's output has grown (or has only ended)."""
        new = len(stream.output) - stream.timed
        if not new:
            return
        if stream.first_s is None:
            stream.first_s = now_s
            self.time_to_first_token.observe(now_s - stream.begin_s)
            stream.trace.first_token()
        else:
            self.inter_token.observe((now_s - stream.grown_s) / new, new)
        stream.timed = len(stream.output)
        stream.grown_s = now_s

    def settled(self, stream: Stream, now_s: float) -> None:
        """A stream has ended, however."""
        reason = stream.finish.reason.value if stream.finish is not None else stream.state.value
        self.ended[reason] = self.ended.get(reason, 0) + 1
        self.input_tokens += len(stream.request.prompt)
        self.output_tokens += len(stream.output)
        self.request_duration.observe(now_s - stream.begin_s)
        if stream.first_s is not None and len(stream.output) > 1:
            self.time_per_output_token.observe((stream.grown_s - stream.first_s) / (len(stream.output) - 1))
