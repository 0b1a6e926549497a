"""Bytes through non-blocking sockets on the running loop, without copies on this side of the kernel.

Every call has a deadline for progress: a peer that moves nothing for `stall_timeout_s` raises TimeoutError.
System calls on large buffers release the interpreter lock, and a receiver of much asks the kernel to wake
it only for large pieces, so that it seldom competes with the other threads for that lock."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

from meshift.kv_memory.transport.limits import Pacer

PIECE_BYTES_MAX = 1 << 20
"""What one system call receives at most; and what the kernel collects before it wakes the receiver."""

LAZY_BYTES_MIN = 1 << 16
"""A smaller rest isn't worth a system call more."""

Progress = Callable[[memoryview], None]
"""Told of each piece that has arrived; may raise."""


def tune(sock: socket.socket) -> None:
    """Non-blocking; small messages leave at once; a peer that vanished without a word is noticed."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


async def connect(host: str, port: int, *, timeout_s: float) -> socket.socket:
    """A tuned connection. Raises OSError or TimeoutError."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(timeout_s):
        family, target = await _resolve(host, port)
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            tune(sock)
            await loop.sock_connect(sock, target)
        except BaseException:
            sock.close()
            raise
    return sock


async def _resolve(host: str, port: int) -> tuple[int, Any]:
    try:
        version = ip_address(host).version
    except ValueError:
        # A name is resolved on a thread of its own.
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return found[0][0], found[0][4]
    return socket.AF_INET6 if version == 6 else socket.AF_INET, (host, port)


async def let_others_run() -> None:
    """A socket that is always ready doesn't make its task wait, and would keep the loop to itself."""
    await asyncio.sleep(0)


def hang_up(sock: socket.socket) -> None:
    """End the connection in both directions; whoever waits on the socket wakes up. It isn't closed, since
    its number may not be used again while the loop still watches it."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


async def receive(sock: socket.socket, view: memoryview, *, stall_timeout_s: float) -> None:
    """Fill a small buffer. Raises ConnectionError at the end of the stream, TimeoutError, OSError."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(stall_timeout_s):
        while view:
            count = await loop.sock_recv_into(sock, view)
            if not count:
                raise ConnectionError("closed by the peer")
            view = view[count:]


async def receive_payload(sock: socket.socket, view: memoryview, progress: Progress, *, stall_timeout_s: float) -> None:
    """Fill a buffer of any size, in large pieces. Raises as `receive`, and what `progress` raises."""
    loop = asyncio.get_running_loop()
    wake_bytes, taken = 1, 0
    try:
        while view:
            piece = view[:PIECE_BYTES_MAX]
            if (len(piece) > LAZY_BYTES_MIN and len(piece) != wake_bytes) or len(piece) < wake_bytes:
                wake_bytes = len(piece)
                _wake_at(sock, wake_bytes)
            async with asyncio.timeout(stall_timeout_s):
                count = await loop.sock_recv_into(sock, piece)
            if not count:
                raise ConnectionError("closed by the peer")
            progress(piece[:count])
            view = view[count:]
            taken += count
            if taken >= PIECE_BYTES_MAX:
                taken = 0
                await let_others_run()
    finally:
        if wake_bytes > 1:
            _wake_at(sock, 1)


async def send(
    sock: socket.socket, head: bytes, payload: bytes | memoryview, pacer: Pacer, *, stall_timeout_s: float
) -> None:
    """Send both, paced. A small payload leaves in one system call with its head. Raises OSError or
    TimeoutError."""
    view = memoryview(payload).cast("B")
    step = pacer.chunk_bytes or PIECE_BYTES_MAX
    first = view[:step]
    await pacer.take(len(head) + len(first))
    await _stalling(_send_both(sock, head, first), stall_timeout_s)
    for start in range(step, len(view), step):
        piece = view[start : start + step]
        await pacer.take(len(piece))
        await _stalling(asyncio.get_running_loop().sock_sendall(sock, piece), stall_timeout_s)
        await let_others_run()


async def send_small(sock: socket.socket, message: bytes, *, stall_timeout_s: float) -> None:
    """Send a message that isn't paced. Raises OSError or TimeoutError."""
    await _stalling(asyncio.get_running_loop().sock_sendall(sock, message), stall_timeout_s)


async def discard(sock: socket.socket, byte_count_max: int, *, timeout_s: float) -> None:
    """Read to the end of the stream and keep nothing, within bounds. Raises as `receive`."""
    loop = asyncio.get_running_loop()
    scratch = bytearray(1 << 16)
    async with asyncio.timeout(timeout_s):
        while byte_count_max > 0:
            count = await loop.sock_recv_into(sock, scratch)
            if not count:
                return
            byte_count_max -= count


async def _stalling(sending: Awaitable[None], stall_timeout_s: float) -> None:
    async with asyncio.timeout(stall_timeout_s):
        await sending


async def _send_both(sock: socket.socket, head: bytes, payload: memoryview) -> None:
    try:
        sent = sock.sendmsg([head, payload])
    except BlockingIOError:
        sent = 0
    loop = asyncio.get_running_loop()
    if sent < len(head):
        await loop.sock_sendall(sock, head[sent:])
        sent = len(head)
    if sent < len(head) + len(payload):
        await loop.sock_sendall(sock, payload[sent - len(head) :])


def _wake_at(sock: socket.socket, byte_count: int) -> None:
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, byte_count)
