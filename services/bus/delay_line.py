"""Delayed calls behind one timer: what stands for the wire in the memory bus."""

import asyncio
import contextvars
import heapq
from collections import deque
from collections.abc import Callable
from typing import Any

NANOSECONDS = 1_000_000_000

_Entry = tuple[int, int, Callable[..., None], tuple[Any, ...]]


class DelayLine:
    """Calls made after a delay, in order of their time, and first in first out at equal times.

    Calls with the usual delay go through a FIFO: their times grow by themselves. Calls with another delay go through
    a heap. One timer, set for the earliest of both, serves all.
    """

    def __init__(self, delay_ns: int) -> None:
        self._delay_ns = delay_ns
        self._sequence = 0
        self._usual: deque[_Entry] = deque()
        self._others: list[_Entry] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._now_ns: Callable[[], int] = self._float_now_ns
        self._wake_ns: int | None = None
        self._timer: asyncio.Handle | None = None
        # The wire knows nothing of whoever set its timer: a receiver's context comes from the message's headers alone.
        self._context = contextvars.Context()

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Use this loop's clock. Raises RuntimeError if calls wait on another one."""
        if loop is self._loop:
            return
        if self._usual or self._others:
            raise RuntimeError("messages are under way on another event loop")
        self._loop = loop
        self._now_ns = getattr(loop, "time_ns", self._float_now_ns)

    def call(self, extra_ns: int, callback: Callable[..., None], *args: Any) -> None:
        """Call after the usual delay."""
        self._sequence += 1
        due_ns = self._now_ns() + self._delay_ns + extra_ns
        if extra_ns:
            heapq.heappush(self._others, (due_ns, self._sequence, callback, args))
        else:
            self._usual.append((due_ns, self._sequence, callback, args))
        if self._wake_ns is None or due_ns < self._wake_ns:
            self._wake_at(due_ns)

    def _float_now_ns(self) -> int:
        assert self._loop is not None, "bound by the first client that starts"
        return round(self._loop.time() * NANOSECONDS)

    def _wake_at(self, due_ns: int) -> None:
        assert self._loop is not None, "bound by the first client that starts"
        if self._timer is not None:
            self._timer.cancel()
        self._wake_ns = due_ns
        if due_ns <= self._now_ns():
            self._timer = self._loop.call_soon(self._pump, context=self._context)
        else:
            self._timer = self._loop.call_at(due_ns / NANOSECONDS, self._pump, context=self._context)

    def _pump(self) -> None:
        # No more than what waits now: a call that makes another one without delay must not keep the loop for ever.
        usual, others = self._usual, self._others
        budget = len(usual) + len(others)
        now_ns = self._now_ns()
        try:
            while budget:
                budget -= 1
                is_usual = bool(usual) and (not others or usual[0] < others[0])
                if (usual if is_usual else others)[0][0] > now_ns:
                    break
                _, _, callback, args = usual.popleft() if is_usual else heapq.heappop(others)
                callback(*args)
        finally:
            self._timer = None
            self._wake_ns = None
            if (head := self._head()) is not None:
                self._wake_at(head[0])

    def _head(self) -> _Entry | None:
        if not self._others:
            return self._usual[0] if self._usual else None
        if not self._usual:
            return self._others[0]
        return min(self._usual[0], self._others[0])
