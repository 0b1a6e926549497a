"""TcpTransport under random use, and through a network that spoils and cuts what it carries: what is applied is
always exact and in order, and nothing is left behind."""

import asyncio
import random
from collections import defaultdict
from contextlib import suppress
from dataclasses import replace

import pytest

from meshift.kernels.cpu.library import is_available
from meshift.kv_memory.transport.base import Patch, TransportError
from meshift.kv_memory.transport.limits import TransportLimits
from meshift.kv_memory.transport.tcp import TcpTransport
from tests.contract.transport_suite import make_patch

TIMEOUT_S = 10.0
SEEDS = range(4)
LIMITS = TransportLimits(
    patch_bytes_max=1 << 20,
    in_flight_bytes_max=1 << 20,
    receive_bytes_max=2 << 20,
    connections_per_peer_max=3,
    stall_timeout_s=0.2,
)


def payload(name: str, watermark: int, size: int) -> bytes:
    return random.Random(f"{name}/{watermark}").randbytes(size)


class Receiver:
    """Notes what is applied, and checks each byte of it."""

    def __init__(self) -> None:
        self.applied: dict[str, list[int]] = defaultdict(list)

    def __call__(self, patch: Patch) -> None:
        assert bytes(patch.payload) == payload(patch.transfer_id, patch.watermark, len(patch.payload))
        self.applied[patch.transfer_id].append(patch.watermark)


class Move:
    """One transfer: patches posted one after the other without waiting, some of which are cancelled."""

    def __init__(self, rng: random.Random, name: str) -> None:
        self.rng, self.name = rng, name
        self.results: list[BaseException | None] = []

    async def run(self, sender: TcpTransport, receiver: TcpTransport, handler: Receiver, location: str) -> None:
        rng = self.rng
        address = replace(receiver.open_transfer(self.name, handler), location=location)
        sends = []
        for watermark in range(1, rng.randrange(2, 12)):
            size = rng.choice((0, 10, 5000, 300_000))
            patch = make_patch(payload(self.name, watermark, size), transfer_id=self.name, watermark=watermark)
            timeout_s = rng.choice((0.001, 0.02, TIMEOUT_S))
            sends.append(asyncio.ensure_future(sender.send(address, patch, timeout_s=timeout_s)))
            await asyncio.sleep(rng.choice((0, 0, 0.001)))
            if rng.random() < 0.05:
                rng.choice(sends).cancel()
            if rng.random() < 0.05:
                receiver.close_transfer(self.name)
        self.results = await asyncio.gather(*sends, return_exceptions=True)
        receiver.close_transfer(self.name)

    def check(self, applied: list[int]) -> None:
        """In order, without a gap, and at least what its sender knows of."""
        assert applied == list(range(1, len(applied) + 1)), self.name
        known = [watermark for watermark, result in enumerate(self.results, 1) if result is None]
        assert known == list(range(1, len(known) + 1))
        assert len(known) <= len(applied)
        for result in self.results[len(known) :]:
            assert isinstance(result, TransportError | asyncio.CancelledError), result


class SpoilingProxy:
    """Carries bytes both ways in pieces; flips one now and then, and cuts connections."""

    def __init__(self, rng: random.Random, target: str) -> None:
        self._rng = rng
        self._host, port = target.split(":")
        self._port = int(port)
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._host, self._port)
        for task in (self._carry(reader, back), self._carry(there, writer)):
            self._tasks.add(asyncio.ensure_future(task))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rng = self._rng
        with suppress(ConnectionError):
            while piece := await reader.read(rng.choice((7, 1000, 1 << 16))):
                if rng.random() < 0.01:
                    spoiled = bytearray(piece)
                    spoiled[rng.randrange(len(piece))] ^= 1 << rng.randrange(8)
                    piece = bytes(spoiled)
                if rng.random() < 0.005:
                    break
                writer.write(piece)
                await writer.drain()
        writer.close()


@pytest.mark.parametrize("through", ["a good network", "a bad network"])
@pytest.mark.parametrize("seed", SEEDS)
async def test_what_is_applied_is_exact_and_in_order(seed: int, through: str) -> None:
    print("seed", seed)
    rng, handler, compiled = random.Random(seed), Receiver(), bool(seed % 2) and is_available()
    sender, receiver = (TcpTransport(limits=LIMITS, compiled=compiled) for _ in range(2))
    await sender.start()
    await receiver.start()
    proxy = SpoilingProxy(rng, receiver.location)
    location = await proxy.start() if through == "a bad network" else receiver.location
    moves = [Move(random.Random(rng.random()), f"move-{index}") for index in range(12)]
    async with asyncio.timeout(3 * TIMEOUT_S):
        await asyncio.gather(*(move.run(sender, receiver, handler, location) for move in moves))
        if through == "a bad network":
            await proxy.close()
        else:
            # Whatever went wrong before, a new transfer finds everything in order.
            last = Move(random.Random(0), "last")
            address = receiver.open_transfer(last.name, handler)
            await sender.send(address, make_patch(payload("last", 1, 1 << 20), transfer_id="last"), timeout_s=TIMEOUT_S)
        while receiver.buffered_bytes:
            await asyncio.sleep(0.001)
        for move in moves:
            move.check(handler.applied[move.name])
        await sender.close()
        await receiver.close()
    assert (sender.connection_count, receiver.connection_count) == (0, 0)
