"""The control channel: one TCP connection from a sending end to a receiving end, for small messages about exchanges.

    message   kind, number of the exchange, length of the body | body

It shares nothing with the library. Nobody waits when speaking: a peer that doesn't listen is dropped."""

import asyncio
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum

from meshift.kv_memory.transport import frames
from meshift.kv_memory.transport.base import TransportError
from meshift.kv_memory.transport.frames import FrameError, PatchHead
from meshift.kv_memory.transport.outgoing import reason_of

BODY_BYTES_MAX = 4096
UNHEARD_BYTES_MAX = 1 << 20
"""That a peer leaves unread before it is dropped."""

LOCATION_BYTES_MAX = 512

_HEAD = struct.Struct("!BQI")
_ANNOUNCEMENT = struct.Struct("!IHH")


class Kind(IntEnum):
    """Of a message. The first three are the sender's."""

    ANNOUNCE = 1
    ENTER = 2
    WITHDRAW = 3
    READY = 4
    ENTERED = 5
    BUSY = 6
    FREE = 7
    REFUSE = 8
    APPLIED = 9
    MEET = 10
    """Either's, while a group is opened."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """All of a patch but its payload, and who sends it."""

    head: PatchHead
    transfer_id: str
    location: str
    """The sender's."""
    group_key: str
    """Of the group that the sender has open with this receiver; empty if none."""
    piece_bytes: int


def pack_announcement(head: bytes, location: str, group_key: str, piece_bytes: int) -> bytes:
    """`head` is `frames.pack_patch`'s."""
    here, key = location.encode(), group_key.encode()
    return _ANNOUNCEMENT.pack(piece_bytes, len(here), len(key)) + here + key + head


def unpack_announcement(body: bytes) -> Announcement:
    """Raises FrameError."""
    if len(body) < _ANNOUNCEMENT.size:
        raise FrameError("an announcement is cut short")
    piece_bytes, location_bytes, key_bytes = _ANNOUNCEMENT.unpack(body[: _ANNOUNCEMENT.size])
    rest = body[_ANNOUNCEMENT.size :]
    location, rest = rest[:location_bytes], rest[location_bytes:]
    key, rest = rest[:key_bytes], rest[key_bytes:]
    raw_head, name = rest[: frames.PATCH_HEAD_BYTES], rest[frames.PATCH_HEAD_BYTES :]
    head = frames.unpack_patch_head(raw_head)
    if not piece_bytes or len(name) != head.transfer_id_bytes or len(location) > LOCATION_BYTES_MAX:
        raise FrameError("an announcement doesn't fit its lengths")
    transfer_id = frames.unpack_transfer_id(head, raw_head, name)
    return Announcement(head, transfer_id, text_of(location), text_of(key), piece_bytes)


class Link:
    """One connection, at either end."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        on_message: "Callable[[Link, Kind, int, bytes], None]",
        on_lost: "Callable[[Link, str], None]",
        first_timeout_s: float | None,
        stall_timeout_s: float,
    ) -> None:
        """`on_message` may raise FrameError, which ends the link; `on_lost` is called once. `first_timeout_s`: until
        `trust` is called, for a peer that isn't known yet."""
        self.peer = ""
        """Its location, once known."""
        self._reader, self._writer = reader, writer
        self._on_message, self._on_lost = on_message, on_lost
        self._stall_timeout_s = stall_timeout_s
        self._failure = ""
        loop = asyncio.get_running_loop()
        self._stranger = None if first_timeout_s is None else loop.call_later(first_timeout_s, self.fail, "a stranger")
        self._reading = loop.create_task(self._read())

    @property
    def failure(self) -> str:
        """Why it is of no use any more; empty while it is."""
        return self._failure

    @property
    def trusted(self) -> bool:
        """Whether the peer has shown a token, or is one that this end has called."""
        return self._stranger is None

    def trust(self, peer: str) -> None:
        """It has shown a token."""
        self.peer = peer
        if self._stranger is not None:
            self._stranger.cancel()
            self._stranger = None

    def say(self, kind: Kind, number: int, body: bytes = b"") -> None:
        """Put a message on the way. What is lost with the link is lost; `on_lost` tells."""
        if self._failure:
            return
        self._writer.write(_HEAD.pack(kind, number, len(body)) + body)
        if self._writer.transport.get_write_buffer_size() > UNHEARD_BYTES_MAX:
            self.fail("the peer doesn't listen")

    def fail(self, reason: str) -> None:
        """End it: what was said still leaves, unless the peer is gone. Idempotent."""
        if self._failure:
            return
        self._failure = reason
        if self._stranger is not None:
            self._stranger.cancel()
        self._reading.cancel()
        self._writer.close()
        self._on_lost(self, reason)

    async def join(self) -> None:
        """After `fail`: nothing of it runs any more."""
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(self._stall_timeout_s):
                await self._writer.wait_closed()
        await asyncio.wait([self._reading])

    async def _read(self) -> None:
        try:
            while True:
                raw = await self._reader.readexactly(_HEAD.size)
                kind, number, body_bytes = _HEAD.unpack(raw)
                if body_bytes > BODY_BYTES_MAX:
                    raise FrameError(f"a message of {body_bytes} bytes")
                async with asyncio.timeout(self._stall_timeout_s):
                    body = await self._reader.readexactly(body_bytes)
                self._on_message(self, _kind(kind), number, body)
        except asyncio.IncompleteReadError:
            self.fail("closed by the peer")
        except (FrameError, OSError, TransportError) as error:
            self.fail(reason_of(error))


def _kind(number: int) -> Kind:
    try:
        return Kind(number)
    except ValueError:
        raise FrameError(f"a message of kind {number}") from None


def text_of(raw: bytes) -> str:
    """Raises FrameError."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise FrameError("a name is not UTF-8") from None
