"""Notices an engine that is alive and doesn't step. Pure: `now_s` comes in."""


class StallWatch:
    """Fed once per report interval."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._step_count = -1
        self._since_s = 0.0

    def is_stalled(self, step_count: int, busy: bool, now_s: float) -> bool:
        """Whether the engine has been busy without a step for the whole stall time."""
        if step_count != self._step_count or not busy:
            self._step_count = step_count
            self._since_s = now_s
        return now_s - self._since_s >= self._stall_s
