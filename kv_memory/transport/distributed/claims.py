"""A rank's claim: one exchange at a time may be about to use the library; the others queue."""

import asyncio
from collections.abc import Callable, Hashable


class Claims:
    """Of one end; who asks first is served first. One loop uses it."""

    def __init__(self) -> None:
        self._queue: dict[Hashable, Callable[[], None]] = {}

    @property
    def holder(self) -> Hashable | None:
        """Who has the claim, or is about to be told so."""
        return next(iter(self._queue), None)

    def take(self, exchange: Hashable, on_claimed: Callable[[], None]) -> None:
        """Queue; `on_claimed` is called from the loop when the claim is this exchange's."""
        assert exchange not in self._queue, exchange
        self._queue[exchange] = on_claimed
        if len(self._queue) == 1:
            self._tell(exchange)

    def give_back(self, exchange: Hashable) -> None:
        """Leave, from the head or from the queue. Idempotent."""
        held = self.holder == exchange
        self._queue.pop(exchange, None)
        if held and self._queue:
            self._tell(next(iter(self._queue)))

    def _tell(self, exchange: Hashable) -> None:
        asyncio.get_running_loop().call_soon(self._claimed, exchange)

    def _claimed(self, exchange: Hashable) -> None:
        on_claimed = self._queue.get(exchange)
        if on_claimed is not None:
            on_claimed()
