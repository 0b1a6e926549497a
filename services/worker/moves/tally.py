"""What one move took, and why it came to nothing. Pure: `now_s` comes in."""

from meshift.backends.base import DeltaSent
from meshift.schemas.moves import MoveFigures, MoveRefusal


class Tally:
    """Kept by the source."""

    def __init__(self, begin_s: float) -> None:
        self.refusal: MoveRefusal | None = None
        """The newest thing that went wrong, until the move has come about nevertheless."""
        self.reason = ""
        self._begin_s = begin_s
        self._counts = MoveFigures().model_dump()

    def note(self, refusal: MoveRefusal, reason: str) -> None:
        """Something went wrong."""
        self.refusal, self.reason = refusal, reason

    def round(self, delta: DeltaSent) -> None:
        """A round was applied."""
        counts = self._counts
        counts["rounds"] += 1
        counts["tokens"] += delta.end - delta.start
        counts["byte_count"] += delta.byte_count
        counts["gather_ns"] += delta.gather_ns
        counts["transfer_ns"] += delta.transfer_ns

    def committed(self, frozen_ns: int, runnable_ns: int) -> None:
        """The destination owns it. Unix times; 0 where one isn't known."""
        self.refusal, self.reason = None, ""
        if frozen_ns and runnable_ns:
            self._counts["frozen_ns"] = max(0, runnable_ns - frozen_ns)

    def figures(self, now_s: float) -> MoveFigures:
        """So far."""
        return MoveFigures(**self._counts | {"duration_ns": round((now_s - self._begin_s) * 1e9)})
