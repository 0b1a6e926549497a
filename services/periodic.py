"""A callback every interval, on the loop's clock."""

import asyncio
import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Periodic:
    """Calls `action` every `interval_s` until stopped. What it raises is logged, and it goes on: a service that
    stops reporting because of one bad round is worse than one bad round."""

    def __init__(self, interval_s: float, action: Callable[[], None]) -> None:
        self._interval_s = interval_s
        self._action = action
        self._loop: asyncio.AbstractEventLoop | None = None
        self._handle: asyncio.TimerHandle | None = None
        self._next_s = 0.0
        self.failures = 0

    def start(self) -> None:
        """The first call comes one interval from now."""
        self._loop = asyncio.get_running_loop()
        self._next_s = self._loop.time() + self._interval_s
        self._handle = self._loop.call_at(self._next_s, self._run)

    def stop(self) -> None:
        """No call follows. Idempotent."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _run(self) -> None:
        loop = self._loop
        assert loop is not None, "started"
        # After a stall the missed rounds are skipped, not made up for in a burst.
        self._next_s = max(self._next_s + self._interval_s, loop.time())
        self._handle = loop.call_at(self._next_s, self._run)
        try:
            self._action()
        except Exception:
            self.failures += 1
            logger.exception("periodic %r failed", getattr(self._action, "__qualname__", self._action))
