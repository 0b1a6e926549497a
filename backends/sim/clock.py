"""The running loop's time in whole nanoseconds, and waits that the engine's end breaks off."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from meshift.backends.base import MoveRefused, Refusal

NANOSECONDS = 1_000_000_000


class Clock:
    """Exact on a loop that counts nanoseconds itself (`time_ns`, `call_at_ns`), else made from its seconds."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waits: dict[asyncio.Future[Any], None] = {}
        self.now_ns: Callable[[], int] = getattr(loop, "time_ns", self._time_ns)
        self.unix_ns: Callable[[], int] = getattr(loop, "time_ns", time.time_ns)
        """In virtual time, its beginning counts as that of Unix time."""
        self.call_at_ns: Callable[..., asyncio.TimerHandle] = getattr(loop, "call_at_ns", self._call_at_ns)
        self.call_soon = loop.call_soon

    def _time_ns(self) -> int:
        return int(self._loop.time() * NANOSECONDS)

    def _call_at_ns(self, when_ns: int, callback: Callable[..., object], *args: object) -> asyncio.TimerHandle:
        return self._loop.call_at(when_ns / NANOSECONDS, callback, *args)

    def future(self) -> "asyncio.Future[Any]":
        """A future for `wait`."""
        return self._loop.create_future()

    async def wait(self, future: "asyncio.Future[Any]", until_ns: int | None = None) -> Any:
        """Its result. Raises TimeoutError at `until_ns`, MoveRefused if the engine ends before."""
        timer = None if until_ns is None else self.call_at_ns(until_ns, _fail, future, TimeoutError())
        self._waits[future] = None
        try:
            return await future
        finally:
            del self._waits[future]
            if timer is not None:
                timer.cancel()

    async def wait_or_lose(self, future: "asyncio.Future[Any]", until_ns: int | None = None) -> Any:
        """The same for what is no move: raises ConnectionError if the engine ends before."""
        try:
            return await self.wait(future, until_ns)
        except MoveRefused as error:
            raise ConnectionError(str(error)) from error

    async def sleep_until(self, when_ns: int) -> None:
        """Raises MoveRefused if the engine ends before."""
        future = self.future()
        timer = self.call_at_ns(when_ns, _resolve, future)
        try:
            await self.wait(future)
        finally:
            timer.cancel()

    def break_waits(self, reason: str) -> None:
        """All that wait now get MoveRefused."""
        for future in self._waits:
            _fail(future, MoveRefused(reason, Refusal.BROKEN))


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


def _fail(future: "asyncio.Future[Any]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
