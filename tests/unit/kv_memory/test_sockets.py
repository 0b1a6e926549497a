"""Sending on sockets that take little at a time, and receiving what comes in crumbs."""

import asyncio
import random
import socket
from collections.abc import Iterable
from typing import Any

import pytest

from meshift.kv_memory.transport import sockets
from meshift.kv_memory.transport.limits import Pacer

TIMEOUT_S = 10.0


class Stingy(socket.socket):
    """Takes no more than `most` bytes of a first message; none if that is 0."""

    most = 5

    def sendmsg(self, buffers: Iterable[Any], *_: Any) -> int:
        if not self.most:
            raise BlockingIOError
        whole = b"".join(bytes(buffer) for buffer in buffers)
        return self.send(whole[: self.most])


def pair() -> tuple[Stingy, socket.socket]:
    one, other = socket.socketpair()
    stingy = Stingy(fileno=one.detach())
    for end in (stingy, other):
        end.setblocking(False)
    return stingy, other


@pytest.mark.parametrize("most", [0, 5, 12])
async def test_a_head_that_leaves_in_parts(most: int) -> None:
    one, other = pair()
    with one, other:
        one.most = most
        received = bytearray(10 + 20)
        await asyncio.gather(
            sockets.send(one, b"h" * 10, b"p" * 20, Pacer(None), stall_timeout_s=TIMEOUT_S),
            sockets.receive(other, memoryview(received), stall_timeout_s=TIMEOUT_S),
        )
        assert bytes(received) == b"h" * 10 + b"p" * 20


@pytest.mark.parametrize("size", [1, sockets.LAZY_BYTES_MIN, sockets.PIECE_BYTES_MAX, 3 * sockets.PIECE_BYTES_MAX + 5])
async def test_a_payload_in_crumbs(size: int) -> None:
    rng = random.Random(size)
    payload = rng.randbytes(size)
    listener = socket.create_server(("127.0.0.1", 0))
    one = socket.create_connection(listener.getsockname())
    other, _ = listener.accept()
    listener.close()
    pieces: list[int] = []

    async def crumble() -> None:
        loop, start = asyncio.get_running_loop(), 0
        while start < size:
            length = rng.choice((1, 100, 70_000, 500_000))
            await loop.sock_sendall(one, payload[start : start + length])
            start += length
            await asyncio.sleep(0)

    with one, other:
        sockets.tune(one)
        sockets.tune(other)
        received = bytearray(size)
        await asyncio.gather(
            crumble(),
            sockets.receive_payload(
                other, memoryview(received), lambda piece: pieces.append(len(piece)), stall_timeout_s=TIMEOUT_S
            ),
        )
        assert bytes(received) == payload
        assert sum(pieces) == size
        # The next small message is heard at once.
        one.send(b"!")
        await sockets.receive(other, memoryview(bytearray(1)), stall_timeout_s=TIMEOUT_S)


async def test_discarding_is_bounded() -> None:
    one, other = pair()
    with one, other:
        one.send(bytes(5000))
        await sockets.discard(other, 1000, timeout_s=TIMEOUT_S)
        one.shutdown(socket.SHUT_WR)
        await sockets.discard(other, 1 << 30, timeout_s=TIMEOUT_S)
