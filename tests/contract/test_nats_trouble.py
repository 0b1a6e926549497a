"""NatsBus when the server or the connection is in trouble."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshift.schemas.errors import (
    MessageTooLarge,
    Overloaded,
    PeerTimeout,
)
from meshift.schemas.instances import InstanceGone, StatusRequest
from meshift.schemas.requests import SubmitReply
from meshift.services.bus.nats import NatsSettings
from meshift.services.launcher import nats_server
from meshift.services.launcher.nats_server import NatsServer
from tests.contract.bus_kit import ASK, DEADLINE_S, REPLY, Mailbox, known, numbered, submit, until
from tests.contract.nats_kit import (
    Proxy,
    buses_at,
    discover,
    running_server,
    until_lost,
)

pytestmark = pytest.mark.nats


@pytest.fixture(scope="module")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that all tests here share."""
    with running_server(tmp_path_factory.mktemp("nats")) as url:
        yield url


async def test_a_service_may_start_before_the_server(tmp_path: Path) -> None:
    probe = NatsServer(tmp_path / "probe")
    url = await probe.start()
    await probe.stop()
    port = int(url.rpartition(":")[2])
    async with buses_at(url) as buses:
        starting = asyncio.ensure_future(buses.started("a"))
        await asyncio.sleep(0.1)
        assert not starting.done()
        async with NatsServer(tmp_path / "server", port=port):
            bus = await starting
            bus.serve("ask", "x", StatusRequest, lambda _: REPLY)
            assert await bus.request("x", ASK, SubmitReply, timeout_s=DEADLINE_S) == REPLY
            await bus.close()


async def test_without_a_server_start_ends_at_its_deadline_and_may_be_tried_again(nats_url: str) -> None:
    async with Proxy(nats_url).open() as nobody:
        pass
    async with buses_at(nobody, connect_timeout_s=0.2) as buses:
        bus = buses.new("a")
        with pytest.raises(PeerTimeout, match=f"{nobody} within 0.2 s.*Error"):
            await buses.start(bus, "a")
        with pytest.raises(PeerTimeout):
            await buses.start(bus, "a")


async def test_after_a_server_restart_all_goes_on(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    url = await server.start()
    try:
        async with buses_at(url, reconnect_wait_s_max=0.1) as buses:
            client = await buses.started("a", publish_queue_max=20)
            service = await buses.started("b")
            mailbox = Mailbox()
            service.subscribe("x", InstanceGone, mailbox)
            service.serve("ask", "y", StatusRequest, lambda _: REPLY)
            await known(client, service)
            await server.stop()
            await until_lost(client)
            while True:
                try:
                    client.publish("x", numbered(2))
                except Overloaded:
                    break
            service.serve("late", "z", StatusRequest, lambda _: REPLY)
            waiting = asyncio.ensure_future(service.request("z", ASK, SubmitReply, timeout_s=DEADLINE_S))
            await server.start()
            await until(lambda: client.counters.reconnects == 1 and service.counters.reconnects == 1)
            await known(service, client)
            assert await waiting == REPLY
            for subject in ("y", "z"):
                assert await client.request(subject, ASK, SubmitReply, timeout_s=DEADLINE_S) == REPLY
            client.publish("x", numbered(3))
            await until(lambda: bool(mailbox.numbers) and mailbox.numbers[-1] == 3)
            names = [info["name"] for info in await discover(url, "$SRV.PING")]
            assert names == ["tester", "tester"]
    finally:
        await server.stop()


async def test_close_while_the_server_is_gone_ends(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    async with buses_at(await server.start()) as buses:
        bus = await buses.started("a", close_timeout_s=0.1)
        await server.stop()
        await until_lost(bus)
        bus.publish("x", ASK)
        async with asyncio.timeout(DEADLINE_S):
            await bus.close()


@pytest.mark.parametrize("line", [b"-ERR 'Maximum Connections Exceeded'\r\n", b"-ERR 'Stale Connection'\r\n"])
async def test_a_client_that_the_server_refuses_is_replaced(nats_url: str, line: bytes) -> None:
    proxy = Proxy(nats_url)
    async with proxy.open() as url, buses_at(url, reconnect_wait_s_min=0.01) as buses:
        bus = await buses.started("a")
        mailbox = Mailbox()
        bus.subscribe("x", InstanceGone, mailbox)
        bus.serve("ask", "y", StatusRequest, lambda _: REPLY)
        await known(bus)
        proxy.say(line)
        await until(lambda: bus.counters.reconnects == 1)
        bus.publish("x", numbered(1))
        assert await bus.request("y", ASK, SubmitReply, timeout_s=DEADLINE_S) == REPLY
        await mailbox.take(1)
        assert bus.counters.received == 2


async def test_a_server_that_falls_silent_is_lost(nats_url: str) -> None:
    proxy = Proxy(nats_url)
    async with proxy.open() as url, buses_at(url, ping_interval_s=0.05, attempt_timeout_s=0.1) as buses:
        bus = await buses.started("a")
        bus.serve("ask", "y", StatusRequest, lambda _: REPLY)
        await known(bus)
        proxy.frozen = True
        with pytest.raises(PeerTimeout):
            await bus.request("y", ASK, SubmitReply, timeout_s=0.05)
        await asyncio.sleep(0.2)
        proxy.frozen = False
        await until(lambda: bus.counters.reconnects >= 1)
        assert await bus.request("y", ASK, SubmitReply, timeout_s=DEADLINE_S) == REPLY


async def test_a_server_with_a_smaller_limit(tmp_path: Path) -> None:
    async with NatsServer(tmp_path, max_payload=1_000) as server, buses_at(server.url) as buses:
        early, bus = buses.new("early"), await buses.started("a")
        mailbox = Mailbox()
        bus.subscribe("x", InstanceGone, mailbox)
        bus.serve("large", "y", StatusRequest, lambda _: numbered(10**1_000))
        await known(bus)
        with pytest.raises(MessageTooLarge, match="1000"):
            bus.publish("x", submit(bytes(1_000)))
        with pytest.raises(MessageTooLarge):
            await bus.request("x", submit(bytes(1_000)), SubmitReply, timeout_s=DEADLINE_S)
        with pytest.raises(MessageTooLarge):
            await bus.request("y", ASK, InstanceGone, timeout_s=DEADLINE_S)
        # One that was queued before the server's limit was known.
        early.publish("x", submit(bytes(1_000)))
        request = asyncio.ensure_future(early.request("x", submit(bytes(1_000)), SubmitReply, timeout_s=DEADLINE_S))
        await asyncio.sleep(0)
        await buses.start(early, "early")
        with pytest.raises(MessageTooLarge):
            await request
        assert early.counters.dropped == 1
        early.publish("x", numbered(1))
        await mailbox.take(1)
        assert (bus.counters.reconnects, early.counters.reconnects) == (0, 0)


async def test_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked = nats_server.CONFIGURATION + "authorization {{ user: ann, password: secret }}\n"
    monkeypatch.setattr(nats_server, "CONFIGURATION", locked)
    async with NatsServer(tmp_path) as server:
        async with buses_at(server.url, user="ann", password="secret") as buses:
            await buses.started("a")
        async with buses_at(server.url.replace("//", "//ann:secret@")) as buses:
            await buses.started("a")
        async with buses_at(server.url, user="ann", password="wrong", connect_timeout_s=0.3) as buses:
            with pytest.raises(PeerTimeout, match="Authorization"):
                await buses.started("a")


def test_settings_don_t_show_secrets() -> None:
    shown = repr(NatsSettings(servers=("nats://h",), client_name="a", password="secret", token="hidden"))
    assert "secret" not in shown
    assert "hidden" not in shown
