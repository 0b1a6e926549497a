"""Large payloads on threads: what arrives, how it ends when it doesn't go well, and that the pace is everybody's."""

import asyncio
import random
import socket
import zlib
from collections.abc import Iterator

import pytest

from meshift.kernels.cpu import streams
from meshift.kernels.cpu.library import is_available
from meshift.kv_memory.transport import compiled, sockets
from meshift.kv_memory.transport.compiled import PAYLOAD_BYTES_MIN, SLICE_BYTES, CompiledStreams
from meshift.kv_memory.transport.limits import Pacer
from meshift.kv_memory.transport.tcp import TcpTransport
from tests.contract.transport_suite import Inbox, make_patch

pytestmark = pytest.mark.skipif(not is_available(), reason="no C++ compiler")

TIMEOUT_S = 10.0
LONG_S = 3600.0
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    listener = socket.create_server(("127.0.0.1", 0))
    one = socket.create_connection(listener.getsockname())
    other, _ = listener.accept()
    listener.close()
    with one, other:
        sockets.tune(one)
        sockets.tune(other)
        yield one, other


def make(bytes_per_s: float | None = None) -> CompiledStreams:
    return CompiledStreams(Pacer(bytes_per_s))


@pytest.mark.parametrize("size", [1, 63, 64, 70_001, (1 << 20) + 5, 3 * SLICE_BYTES + 17])
async def test_what_is_sent_arrives_with_its_checksum(pair: Pair, size: int) -> None:
    one, other = pair
    payload, received, threads = random.Random(size).randbytes(size), bytearray(size), make()
    _, checksum = await asyncio.gather(
        threads.send(one, memoryview(payload), stall_timeout_s=TIMEOUT_S),
        threads.receive(other, memoryview(received), zlib.crc32(b"before"), stall_timeout_s=TIMEOUT_S),
    )
    assert bytes(received) == payload
    assert checksum == zlib.crc32(b"before" + payload)
    # The next small message is heard at once.
    await asyncio.get_running_loop().sock_sendall(one, b"x")
    last = bytearray(1)
    await sockets.receive(other, memoryview(last), stall_timeout_s=TIMEOUT_S)
    assert last == b"x"
    threads.close()


async def test_a_payload_in_crumbs(pair: Pair) -> None:
    one, other = pair
    rng, size, threads = random.Random(3), 2_000_003, make()
    payload, received = rng.randbytes(size), bytearray(size)
    reading = asyncio.ensure_future(threads.receive(other, memoryview(received), 0, stall_timeout_s=TIMEOUT_S))
    start = 0
    while start < size:
        length = rng.choice((1, 100, 70_000, 500_000))
        await asyncio.get_running_loop().sock_sendall(one, payload[start : start + length])
        start += length
    assert await reading == zlib.crc32(payload)
    assert bytes(received) == payload


async def test_a_peer_that_leaves(pair: Pair) -> None:
    one, other = pair
    threads = make()
    reading = asyncio.ensure_future(threads.receive(other, memoryview(bytearray(1000)), 0, stall_timeout_s=TIMEOUT_S))
    await asyncio.get_running_loop().sock_sendall(one, b"part")
    one.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionError, match="closed by the peer"):
        await reading
    other.close()
    with pytest.raises(ConnectionError):
        await threads.send(one, memoryview(bytes(16 << 20)), stall_timeout_s=TIMEOUT_S)


async def test_a_peer_that_stalls(pair: Pair) -> None:
    one, _ = pair
    threads = make()
    with pytest.raises(TimeoutError):
        await threads.send(one, memoryview(bytes(64 << 20)), stall_timeout_s=0.01)
    with pytest.raises(TimeoutError):
        await threads.receive(one, memoryview(bytearray(10)), 0, stall_timeout_s=0.01)


@pytest.mark.parametrize("waits_for", ["room", "bytes", "its turn"])
async def test_who_gives_up_hangs_up(pair: Pair, waits_for: str) -> None:
    """However long it would have waited; and its memory is its own again."""
    one, _ = pair
    threads = make(1.0 if waits_for == "its turn" else None)
    memory = bytearray(64 << 20)
    task: asyncio.Future[int | None]
    if waits_for == "bytes":
        task = asyncio.ensure_future(threads.receive(one, memoryview(memory), 0, stall_timeout_s=LONG_S))
    else:
        task = asyncio.ensure_future(threads.send(one, memoryview(memory), stall_timeout_s=LONG_S))
    await asyncio.sleep(0)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, TIMEOUT_S)
    with pytest.raises(BrokenPipeError):
        one.send(b"x")
    threads.close()


async def test_the_pace_is_everybodys() -> None:
    """What threads have booked holds up who goes through the loop, and the other way round."""
    pacer = Pacer(1e6)
    CompiledStreams(pacer)
    shared = pacer._reserve
    assert shared is not None
    first_s = shared(2_000_000)
    assert 1.9 < first_s <= 2.0
    assert first_s + 0.9 < shared(1_000_000) <= 3.0
    taking = asyncio.ensure_future(pacer.take(10))
    await asyncio.sleep(0)
    assert not taking.done()
    taking.cancel()
    CompiledStreams(unlimited := Pacer(None))
    await unlimited.take(1 << 40)


def test_a_pace_without_use_saves_up_little() -> None:
    pace = streams.Pace(1e6, 0.01)
    assert pace.reserve(10_000) == 0.0
    assert 0.0 < pace.reserve(100_000) <= 0.1


async def test_more_than_there_are_threads_go_through_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "THREADS_MAX", 1)
    sender, receiver = TcpTransport(compiled=True), TcpTransport(compiled=True)
    await sender.start()
    await receiver.start()
    inboxes = [Inbox() for _ in range(6)]
    sends = []
    for index, inbox in enumerate(inboxes):
        name, payload = f"move-{index}", random.Random(index).randbytes(SLICE_BYTES + 1000)
        address = receiver.open_transfer(name, inbox)
        sends.append(sender.send(address, make_patch(payload, transfer_id=name), timeout_s=TIMEOUT_S))
    await asyncio.gather(*sends)
    for index, inbox in enumerate(inboxes):
        assert inbox.patches[0].payload == random.Random(index).randbytes(SLICE_BYTES + 1000)
    await sender.close()
    await receiver.close()


def test_small_payloads_are_not_for_them() -> None:
    threads = make()
    assert not threads.takes(PAYLOAD_BYTES_MIN - 1)
    assert threads.takes(PAYLOAD_BYTES_MIN)
    threads.close()
