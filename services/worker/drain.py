"""When a worker that drains may leave. Pure: `now_s` comes in."""


class Drain:
    """Begun by `begin`."""

    def __init__(self, acknowledge_wait_s: float) -> None:
        self._acknowledge_wait_s = acknowledge_wait_s
        self._begun = False
        self._acknowledge_until_s: float | None = None
        self.until_s = 0.0
        """It leaves then, whatever is left."""

    def begin(self, until_s: float) -> None:
        """A later call may only shorten it."""
        self.until_s = min(self.until_s, until_s) if self._begun else until_s
        self._begun = True

    def may_leave(self, running: int, unacknowledged: int, now_s: float) -> bool:
        """Whether nothing runs any more, or the deadline has come; and the last finishes have been acknowledged, or
        waited for."""
        if running and now_s < self.until_s:
            return False
        if self._acknowledge_until_s is None:
            self._acknowledge_until_s = now_s + self._acknowledge_wait_s
        return not unacknowledged or now_s >= self._acknowledge_until_s
