"""An event loop with real sockets and a clock of its own: what waits for a timer doesn't wait.

The clock doesn't count what the process computes, nor how long the machine leaves it without a CPU. So whoever needs
few turns of the loop always comes before who waits for a timer, on a busy machine as on an idle one. Only for tests
whose peers all run on the loop: what comes over the loopback device is there as soon as it is sent.
"""

import asyncio
import selectors

TURN_S = 1e-6
"""What a turn of the loop counts, so that who polls comes to an end."""

SKIPPED_S_MAX = 0.02
"""A longer wait may be somebody's deadline: then what is on its way gets `GRACE_S` of real time."""

GRACE_S = 0.05


class _Selector(selectors.DefaultSelector):
    """Each `select` is the end of a turn."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What is ready; else the time is over that it may take."""
        self.now_s += TURN_S
        if timeout is None:
            return super().select(None)
        events = super().select(GRACE_S if timeout > SKIPPED_S_MAX else 0)
        if not events:
            self.now_s += max(timeout, 0.0)
        return events


class SocketLoop(asyncio.SelectorEventLoop):
    """The loop."""

    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        """Seconds since the loop was made; the same for a whole turn."""
        return self._clock.now_s
