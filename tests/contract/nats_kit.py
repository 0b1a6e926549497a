"""What the tests of NatsBus share."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import nats
import nats.errors
import pytest
from nats.aio.client import Client

from meshift.schemas.errors import (
    PeerTimeout,
)
from meshift.services.bus.base import Bus, Propagator
from meshift.services.bus.nats import NatsBus, NatsSettings
from meshift.services.bus.nats_client import BusClient
from meshift.services.bus.settings import BusLimits
from meshift.services.launcher.nats_server import NatsServer
from tests.contract.bus_kit import DEADLINE_S, Buses


@contextmanager
def running_server(data_dir: Path) -> Iterator[str]:
    """A server for the tests of one module; its URL."""
    server = NatsServer(data_dir)
    with asyncio.Runner() as runner:
        runner.run(server.start())
        try:
            yield server.url
        finally:
            runner.run(server.stop())


def buses_of(url: str, **settings: Any) -> Buses:
    """Clients of the server at `url`."""

    def make(name: str, limits: BusLimits, propagator: Propagator | None) -> Bus:
        return NatsBus(NatsSettings(servers=(url,), client_name=name, limits=limits, **settings), propagator=propagator)

    return Buses(make)


@asynccontextmanager
async def buses_at(url: str, **settings: Any) -> AsyncIterator[Buses]:
    """Clients that are closed at the end."""
    buses = buses_of(url, **settings)
    try:
        yield buses
    finally:
        await buses.close()


@asynccontextmanager
async def raw_client(url: str) -> AsyncIterator[Client]:
    """What isn't meshift but is on the same bus."""
    client = await nats.connect(url)
    try:
        yield client
    finally:
        await client.close()


class Proxy:
    """Stands between clients and a server, and says to clients what a server may say."""

    def __init__(self, server_url: str) -> None:
        self._server_port = int(server_url.rpartition(":")[2])
        self._clients: list[asyncio.StreamWriter] = []
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.frozen = False

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        """Its URL."""
        listener = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        try:
            yield f"nats://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        finally:
            listener.close()
            for writer in self._writers:
                writer.close()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def say(self, line: bytes) -> None:
        """Say it to all clients."""
        for writer in self._clients:
            writer.write(line)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        self._clients.append(writer)
        self._writers += [writer, server_writer]
        for source, sink in ((reader, server_writer), (server_reader, writer)):
            self._tasks.append(asyncio.ensure_future(self._copy(source, sink)))

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65_536):
                if not self.frozen:
                    sink.write(data)
            sink.close()


def refuse_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing goes straight into a connection's buffer, as when the socket doesn't keep up."""
    monkeypatch.setattr(BusClient, "publish_now", lambda *_: False)


def fail_once(monkeypatch: pytest.MonkeyPatch, method: str, error: Exception) -> list[Exception]:
    """Make the next call of a method of nats-py's client raise. Returns what is still to be raised."""
    original = getattr(Client, method)
    left = [error]

    async def call(self: Client, *args: Any, **kwargs: Any) -> Any:
        if left:
            raise left.pop()
        return await original(self, *args, **kwargs)

    monkeypatch.setattr(Client, method, call)
    return left


async def discover(url: str, subject: str) -> list[dict[str, Any]]:
    """What all services answer, as the `nats micro` commands ask them."""
    answers: list[dict[str, Any]] = []
    async with raw_client(url) as client:
        inbox = client.new_inbox()

        async def on_answer(message: Any) -> None:
            answers.append(json.loads(message.data))

        await client.subscribe(inbox, cb=on_answer)
        await client.publish(subject, reply=inbox)
        await client.flush()
        await asyncio.sleep(0.05)
    return answers


async def until_lost(bus: Bus) -> None:
    """Publish until the client has noticed that the server is gone."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                await bus.flush(timeout_s=0.05)
            except PeerTimeout:
                return
