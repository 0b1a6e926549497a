"""TcpTransports, and peers that do what they shouldn't."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from meshift.kv_memory.transport import frames
from meshift.kv_memory.transport.base import Address, Patch, TransportError
from meshift.kv_memory.transport.limits import TransportLimits
from meshift.kv_memory.transport.tcp import TcpTransport

TIMEOUT_S = 10.0
SOON_S = 0.05
LIMITS = TransportLimits(
    patch_bytes_max=8 << 20,
    in_flight_bytes_max=8 << 20,
    receive_bytes_max=8 << 20,
    connect_timeout_s=TIMEOUT_S,
)
TOKEN = "5a" * frames.TOKEN_BYTES

Play = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def started(limits: TransportLimits = LIMITS) -> AsyncIterator[TcpTransport]:
    end = TcpTransport(limits=limits)
    await end.start()
    try:
        yield end
    finally:
        await end.close()


@asynccontextmanager
async def peer_that(play: Play) -> AsyncIterator[Address]:
    """A receiver that does as it is told with each connection."""

    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await play(reader, writer)
        writer.close()

    server = await asyncio.start_server(run, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield Address("tcp", f"127.0.0.1:{port}", 0, TOKEN)
    finally:
        server.close()


async def freeze(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    await asyncio.sleep(2 * TIMEOUT_S)


async def read_patch(reader: asyncio.StreamReader) -> frames.PatchHead:
    head = frames.unpack_patch_head(await reader.readexactly(frames.PATCH_HEAD_BYTES))
    await reader.readexactly(head.transfer_id_bytes + head.payload_bytes)
    return head


async def fails(send: Awaitable[None]) -> str:
    with pytest.raises(TransportError) as caught:
        await asyncio.wait_for(send, TIMEOUT_S)
    return str(caught.value)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.001)


class Raw:
    """A sender that can send anything, on a socket of its own."""

    def __init__(self, address: Address, receive_buffer_bytes: int | None = None) -> None:
        host, port = address.location.split(":")
        self.socket = socket.socket()
        if receive_buffer_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        self.socket.connect((host, int(port)))
        self.socket.setblocking(False)
        self.address = address

    def head(self, patch: Patch, sequence: int = 0) -> bytes:
        return frames.pack_patch(patch, self.address.token, sequence)

    async def send(self, raw: bytes) -> None:
        await asyncio.wait_for(asyncio.get_running_loop().sock_sendall(self.socket, raw), TIMEOUT_S)

    async def answer(self) -> tuple[bool, str]:
        head = frames.unpack_answer_head(await self.read(frames.ANSWER_HEAD_BYTES))
        return head.applied, (await self.read(head.reason_bytes)).decode()

    async def read(self, size: int) -> bytes:
        raw = b""
        while len(raw) < size:
            piece = await asyncio.wait_for(
                asyncio.get_running_loop().sock_recv(self.socket, size - len(raw)), TIMEOUT_S
            )
            if not piece:
                raise ConnectionError("closed")
            raw += piece
        return raw

    async def dropped(self) -> bool:
        """Whether the receiver ends the connection, without a word."""
        with suppress(ConnectionError):
            return (await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self.socket, 1), TIMEOUT_S)) == b""
        return True
