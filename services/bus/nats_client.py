"""nats-py's client with a short way out and in for the bus's messages.

nats-py takes each message through several coroutines, an object and, on arrival, a queue with a task for each
subscription: more work than to write and read the JSON. Here a message goes straight into nats-py's send buffer, and
from the parser straight to its receiver. The buffer, its flusher, subscribing, reconnecting: all that stays nats-py's.
Its statistics don't count such messages; the bus has its own.

This knows nats-py's insides. Its version is pinned; the contract suite of the bus is the gate for another one.
"""

import asyncio
import re
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

from meshift.services.bus.base import Headers
from meshift.services.bus.nats_library import Client, Subscription
from meshift.services.bus.nats_parser import MessageParser

Receiver = Callable[[bytes, bytes, bytes, bytes | None], None]
"""Takes subject, reply subject, payload and raw headers (None: there are none), on the event loop. Must not raise."""

SEND_BUFFER_BYTES_MAX: Final = 1024 * 1024
"""Of messages that wait for the socket, above which one more goes the long way, which waits."""

TURN_MAX: Final = 128
"""Messages that one inlet hands on before the loop gets a turn."""

INLET_BYTES_MAX: Final = 128 * 1024 * 1024
"""Of messages that wait in one inlet."""

STATUS_HEADER: Final = "Status"
"""Under which `parse_headers` gives the server's status, as nats-py does."""

_HEADER_LINE = b"NATS/1.0"
_LINE_END = b"\r\n"
_PLAIN_KEY = re.compile("[A-Za-z0-9-]+")


class BusClient(Client):
    """One connection."""

    def __init__(self) -> None:
        super().__init__()
        self._receivers: dict[int, Receiver] = {}
        self._ps = MessageParser(self, self._take)

    def publish_now(self, subject: str, payload: bytes, reply: str = "", headers: Headers | None = None) -> bool:
        """Buffer a message for sending, behind what is buffered. False, and nothing done, if it must go the long way:
        there is no connection now, or the socket doesn't keep up, or the headers need care.

        Subjects must be valid, and the size checked.
        """
        flushes, flusher = self._flush_queue, self._flusher_task
        if self._status != Client.CONNECTED or flushes is None or flusher is None or flusher.done():
            return False
        head = b"" if not headers else _header_block(headers)
        if head is None:
            return False
        size = len(head) + len(payload)
        if self._pending_data_size + size > SEND_BUFFER_BYTES_MAX:
            return False
        if head:
            command = f"HPUB {subject} {reply} {len(head)} {size}\r\n".encode() + head
        else:
            command = f"PUB {subject} {reply} {size}\r\n".encode()
        self._pending += (command, payload, _LINE_END)
        self._pending_data_size += len(command) + len(payload) + len(_LINE_END)
        if flushes.empty():
            flushes.put_nowait(asyncio.get_running_loop().create_future())
        return True

    async def subscribe_to(self, subject: str, receiver: Receiver, queue: str = "") -> Subscription:
        """Call `receiver` for each message as it comes off the socket. Raises what `subscribe` does."""
        sid = self._sid + 1
        self._receivers[sid] = receiver
        try:
            subscription = await self.subscribe(subject, queue=queue)
            assert subscription._id == sid
        except BaseException:
            self._receivers.pop(sid, None)
            raise
        return subscription

    def _take(
        self, sid: int, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None
    ) -> Awaitable[None] | None:
        receiver = self._receivers.get(sid)
        if receiver is None:
            return self._process_msg(sid, subject, reply, payload, headers or b"")
        receiver(subject, reply, payload, headers)
        return None

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        super()._remove_sub(sid, max_msgs)
        self._receivers.pop(sid, None)


class Inlet:
    """A bounded queue between the socket and a receiver that takes its time, and the loop's turns in between."""

    __slots__ = ("_bytes", "_loop", "_messages", "_messages_max", "_on_drop", "_receiver", "_scheduled")

    def __init__(self, receiver: Receiver, messages_max: int, on_drop: Callable[[], None]) -> None:
        """`on_drop` hears of each message that finds the queue full."""
        self._receiver = receiver
        self._messages_max = messages_max
        self._on_drop = on_drop
        self._loop = asyncio.get_running_loop()
        self._messages: deque[tuple[bytes, bytes, bytes, bytes | None]] = deque()
        self._bytes = 0
        self._scheduled = False

    def put(self, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        """A `Receiver`."""
        if len(self._messages) >= self._messages_max or self._bytes + len(payload) > INLET_BYTES_MAX:
            self._on_drop()
            return
        self._messages.append((subject, reply, payload, headers))
        self._bytes += len(payload)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._hand_on)

    def _hand_on(self) -> None:
        messages, receiver = self._messages, self._receiver
        try:
            for _ in range(min(len(messages), TURN_MAX)):
                message = messages.popleft()
                self._bytes -= len(message[2])
                receiver(*message)
        finally:
            self._scheduled = bool(messages)
            if messages:
                self._loop.call_soon(self._hand_on)


def parse_headers(raw: bytes | None) -> dict[str, str] | None:
    """Headers as they came, the server's status among them; None if there are none."""
    if not raw:
        return None
    first, _, lines = raw.partition(_LINE_END)
    headers = Client._parse_header_lines(lines)
    status = first[len(_HEADER_LINE) :].split(maxsplit=1)
    if status and status[0].isdigit():
        headers[STATUS_HEADER] = status[0].decode()
    return headers


def _header_block(headers: Headers) -> bytes | None:
    """Headers on the wire; None if some key or value could be misread there, which nats-py mends or refuses."""
    lines = [f"{key}: {value}" for key, value in headers.items()]
    block = "\r\n".join(("NATS/1.0", *lines, "", ""))
    whole = block.count("\n") == len(lines) + 2 == block.count("\r")
    return block.encode() if whole and all(map(_PLAIN_KEY.fullmatch, headers)) else None
