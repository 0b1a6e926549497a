"""Deliveries to the listener: in order, never inside a call of the listener's owner, none after the end."""

import asyncio
from collections import deque
from collections.abc import Sequence

from meshift.backends.base import EngineFailure, EngineListener, TokenEvent
from meshift.backends.sim.clock import Clock


class Outbox:
    """Delivers with `call_soon`: at the same instant, after whatever runs now. So a step's events reach the listener
    in the same order whether the step ended by its timer or because an outside call looked at the engine."""

    def __init__(self, clock: Clock, listener: EngineListener) -> None:
        self._clock = clock
        self._listener = listener
        self._waiting: deque[Sequence[TokenEvent] | EngineFailure] = deque()
        self._handle: asyncio.Handle | None = None
        self._closed = False

    @property
    def pending(self) -> bool:
        """Whether something waits to be delivered."""
        return bool(self._waiting)

    def put(self, item: Sequence[TokenEvent] | EngineFailure) -> None:
        """Deliver soon. After a failure nothing more is taken."""
        if not self._closed:
            self._waiting.append(item)
            self._closed = isinstance(item, EngineFailure)
            self._schedule()

    def close(self) -> None:
        """Deliver nothing any more."""
        self._closed = True
        self._waiting.clear()
        if self._handle is not None:
            self._handle.cancel()

    def _schedule(self) -> None:
        if self._handle is None:
            self._handle = self._clock.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._handle = None
        try:
            while self._waiting:
                item = self._waiting.popleft()
                if isinstance(item, EngineFailure):
                    self._listener.on_failure(item)
                else:
                    self._listener.on_step(item)
        finally:
            # A listener that raises loses its own delivery only.
            if self._waiting:
                self._schedule()
