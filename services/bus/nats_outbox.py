"""What a NATS bus client has yet to tell the server, in order: messages, and changes of interest."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from meshift.schemas.errors import Overloaded
from meshift.services.bus.base import Headers
from meshift.services.bus.nats_client import BusClient


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message that waits for the connection."""

    subject: str
    payload: bytes
    headers: Headers | None
    reply: str = ""
    token: int | None = None
    """Of the request that it is; a request whose caller has given up isn't sent."""


Action = Callable[[BusClient], Awaitable[None]]
"""Subscribes, unsubscribes... At its place in the queue."""


class Outbox:
    """A queue with a bound in messages and in bytes. Actions are few and don't count."""

    def __init__(self, messages_max: int, bytes_max: int) -> None:
        self._messages_max = messages_max
        self._bytes_max = bytes_max
        self._messages = 0
        self._bytes = 0
        self._items: deque[Outgoing | Action] = deque()
        self._filled = asyncio.Event()

    def put(self, item: Outgoing) -> None:
        """Queue a message. Raises `Overloaded`."""
        if self._messages >= self._messages_max or self._bytes + len(item.payload) > self._bytes_max:
            raise Overloaded(f"{self._messages} messages of {self._bytes} bytes wait for the NATS connection")
        self._messages += 1
        self._bytes += len(item.payload)
        self._append(item)

    def put_action(self, action: Action) -> None:
        """Queue an action."""
        self._append(action)

    async def head(self) -> Outgoing | Action:
        """The first item, once there is one. It stays until `done`."""
        while not self._items:
            self._filled.clear()
            await self._filled.wait()
        return self._items[0]

    def done(self) -> None:
        """The first item was sent, or never will be."""
        item = self._items.popleft()
        if isinstance(item, Outgoing):
            self._messages -= 1
            self._bytes -= len(item.payload)

    @property
    def empty(self) -> bool:
        """Whether nothing waits."""
        return not self._items

    def _append(self, item: Outgoing | Action) -> None:
        self._items.append(item)
        self._filled.set()
