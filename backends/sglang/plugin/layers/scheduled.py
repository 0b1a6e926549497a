"""How many tokens' KV was written, and how many a step reads: the same figures on all ranks."""

from collections import deque
from typing import Any


class Scheduled:
    """`T_sched` of one rank, and what it was at the last boundaries."""

    def __init__(self) -> None:
        self.tokens = 1
        """Whose KV was written, and one: 0 promises nothing."""
        self._history: deque[int] = deque(maxlen=1)

    def add(self, tokens: int) -> None:
        """Their KV is written, and marked."""
        self.tokens += tokens

    def note_boundary(self, loop_size: int) -> None:
        """An iteration is about to launch its step."""
        if self._history.maxlen != loop_size:
            self._history = deque(maxlen=loop_size)
        self._history.append(self.tokens)

    def read_by(self, batch: Any) -> int:
        """The watermark of what the step reads that is about to be launched. Results of the last `loop_size - 1`
        iterations aren't processed: nothing reads their KV but the next chunk of a prompt."""
        if any(req.inflight_middle_chunks > 0 for req in batch.reqs):
            return self._history[-1]
        return self._history[0]
