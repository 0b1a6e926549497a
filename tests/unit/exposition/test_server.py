"""The metrics server on a real socket."""

import asyncio
import socket

import httpx
import pytest

from meshift.services.bus.base import BusCounters
from meshift.services.exposition import BusCollector, Exposition
from meshift.services.exposition.server import MetricsServer, MetricsSettings

DEADLINE_S = 10.0


def exposition(published: int = 3) -> Exposition:
    return Exposition(BusCollector("test", BusCounters(published=published)))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


async def fetch(port: int) -> str:
    async with asyncio.timeout(DEADLINE_S), httpx.AsyncClient() as client:
        return (await client.get(f"http://127.0.0.1:{port}/metrics")).text


async def test_it_shows_the_metrics_until_it_is_stopped() -> None:
    port = free_port()
    server = MetricsServer(exposition(), MetricsSettings(metrics_port=port))
    server.start()
    assert 'meshift_bus_published_total{service="test"} 3.0' in await fetch(port)
    await server.stop()
    await server.stop()
    with pytest.raises(httpx.ConnectError):
        await fetch(port)


async def test_without_a_port_nothing_listens() -> None:
    server = MetricsServer(exposition(), MetricsSettings())
    server.start()
    assert server._task is None
    await server.stop()


async def test_two_services_in_one_process_keep_apart() -> None:
    first, second = exposition(1), exposition(2)
    assert b"published_total" in first.render()[0]
    assert b'{service="test"} 1.0' in first.render()[0]
    assert b'{service="test"} 2.0' in second.render()[0]


async def test_a_port_that_is_taken_is_an_os_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = MetricsServer(exposition(), MetricsSettings(metrics_port=taken.getsockname()[1]))
        with pytest.raises(OSError, match="in use"):
            server.start()


def test_the_form_follows_the_accept_header() -> None:
    assert exposition().render("application/openmetrics-text; version=1.0.0")[1].startswith("application/openmetrics")
    assert exposition().render("")[1].startswith("text/plain")
