"""NatsBus against a real nats-server: the suite, and what only a server can do to it."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from nats.micro import add_service
from nats.micro.request import Request, ServiceError

from meshift.schemas.errors import InternalError, InvalidRequest, MessageTooLarge, Overloaded, PeerGone, PeerTimeout
from meshift.schemas.instances import InstanceGone, StatusRequest
from meshift.schemas.requests import Submit, SubmitReply
from meshift.services.bus.base import Bus, Propagator, ServiceInfo
from meshift.services.bus.nats import NatsBus, NatsSettings
from meshift.services.bus.settings import BusLimits
from meshift.services.launcher import nats_server
from meshift.services.launcher.nats_server import NatsServer
from tests.contract.bus_suite import (
    ASK,
    DEADLINE_S,
    REPLY,
    Buses,
    BusSuite,
    Mailbox,
    known,
    numbered,
    submit,
    until,
)

pytestmark = pytest.mark.nats


@pytest.fixture(scope="session")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that all tests share."""
    server = NatsServer(tmp_path_factory.mktemp("nats"))
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


class TestNatsBus(BusSuite):
    """The suite on NATS."""

    @pytest.fixture
    def buses(self, nats_url: str) -> Buses:
        return buses_of(nats_url)


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


# The server comes and goes


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
            await _until_queued(client)
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
            names = [info["name"] for info in await _discover(url, "$SRV.PING")]
            assert names == ["tester", "tester"]
    finally:
        await server.stop()


async def _until_queued(bus: Bus) -> None:
    """Publish until the client has noticed that the server is gone."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                await bus.flush(timeout_s=0.05)
            except PeerTimeout:
                return


async def test_close_while_the_server_is_gone_ends(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    async with buses_at(await server.start()) as buses:
        bus = await buses.started("a", close_timeout_s=0.1)
        await server.stop()
        await _until_queued(bus)
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


# Others on the same bus


async def _discover(url: str, subject: str) -> list[dict[str, Any]]:
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


async def test_services_show_themselves_to_nats_micro(nats_url: str) -> None:
    async with buses_at(nats_url) as buses:
        service = buses.new("b")
        answer = asyncio.Event()

        async def refuse(_: StatusRequest) -> SubmitReply:
            await answer.wait()
            raise InvalidRequest("no")

        service.serve("submit", "meshift.x.submit", StatusRequest, lambda _: REPLY)
        service.serve("refuse", "meshift.x.refuse", StatusRequest, refuse)
        gone = service.serve("gone", "meshift.x.gone", StatusRequest, lambda _: REPLY)
        await service.start(ServiceInfo("worker", "w1", "The llumlet", {"model": "m"}))
        gone.close()
        await known(service)
        (ping,) = await _discover(nats_url, "$SRV.PING.worker")
        assert ping["metadata"] == {"model": "m", "instance": "w1"}
        (info,) = await _discover(nats_url, f"$SRV.INFO.worker.{ping['id']}")
        assert info["description"] == "The llumlet"
        assert [(e["name"], e["subject"], e["queue_group"]) for e in info["endpoints"]] == [
            ("submit", "meshift.x.submit", "q"),
            ("refuse", "meshift.x.refuse", "q"),
        ]
        for _ in range(3):
            await service.request("meshift.x.submit", ASK, SubmitReply, timeout_s=DEADLINE_S)
        asyncio.get_running_loop().call_later(0.05, answer.set)
        with pytest.raises(InvalidRequest):
            await service.request("meshift.x.refuse", ASK, SubmitReply, timeout_s=DEADLINE_S)
        (stats,) = await _discover(nats_url, "$SRV.STATS.worker")
        submits, refusals = stats["endpoints"]
        assert (submits["num_requests"], submits["num_errors"]) == (3, 0)
        assert (refusals["num_requests"], refusals["num_errors"]) == (1, 1)
        assert refusals["last_error"] == "InvalidRequest: no"
        assert refusals["average_processing_time"] > 40_000_000, "the time of the handler, in ns"
        assert refusals["data"] == {"running": 0, "overloaded": 0}
    assert await _discover(nats_url, "$SRV.PING.worker") == []


async def test_errors_carry_the_headers_of_micro_services(nats_url: str) -> None:
    async with buses_at(nats_url) as buses, raw_client(nats_url) as client:
        service = await buses.started("b")

        def refuse(_: StatusRequest) -> SubmitReply:
            raise Overloaded("full\r\nup" + "!" * 10_000_000)

        service.serve("refuse", "x", StatusRequest, refuse)
        await known(service)
        answer = await client.request("x", ASK.model_dump_json().encode(), timeout=DEADLINE_S)
        assert answer.headers is not None
        assert answer.headers["Nats-Service-Error-Code"] == "429"
        assert answer.headers["Nats-Service-Error"].startswith("full  up!!")
        assert json.loads(answer.data)["code"] == "overloaded"
        with pytest.raises(Overloaded, match="full"):
            await service.request("x", ASK, SubmitReply, timeout_s=DEADLINE_S)


async def test_an_error_of_a_foreign_service_is_an_internal_error(nats_url: str) -> None:
    async with buses_at(nats_url) as buses, raw_client(nats_url) as client:

        async def refuse(_: Request) -> None:
            raise ServiceError("418", "a teapot")

        foreign = await add_service(client, name="foreign", version="1.0.0")
        await foreign.add_endpoint(name="refuse", subject="x", handler=refuse)
        assert (await client.request("x", timeout=DEADLINE_S)).headers is not None
        bus = await buses.started("a")
        with pytest.raises(InternalError):
            await bus.request("x", ASK, SubmitReply, timeout_s=DEADLINE_S)


@pytest.mark.parametrize(
    "payload",
    [b"", b"{", b"\xff", b"[]", b'{"kind":"instance_gone"}', b'{"kind":"status_request","version":2}'],
)
async def test_garbage_is_counted_and_others_go_on(
    nats_url: str, payload: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with buses_at(nats_url) as buses, raw_client(nats_url) as client:
        bus = await buses.started("a")
        mailbox = Mailbox()
        bus.subscribe("x", InstanceGone, mailbox)
        bus.serve("ask", "y", StatusRequest, lambda _: REPLY)
        await known(bus)
        for _ in range(20):
            await client.publish("x", payload)
        await client.publish("x", numbered(1).model_dump_json().encode())
        await mailbox.take(1)
        assert bus.counters.invalid == 20
        assert caplog.text.count("refused") == 1, "rate-limited"
        answer = await client.request("y", payload, timeout=DEADLINE_S)
        assert json.loads(answer.data)["code"] == "invalid_request"


async def test_unknown_fields_are_refused_by_name(nats_url: str) -> None:
    async with buses_at(nats_url) as buses, raw_client(nats_url) as client:
        bus = await buses.started("a")
        bus.serve("submit", "x", Submit, lambda _: REPLY)
        await known(bus)
        fields = submit(b"").model_dump(mode="json")
        fields["sampling"]["colour"] = "red"
        answer = await client.request("x", json.dumps(fields).encode(), timeout=DEADLINE_S)
        assert json.loads(answer.data)["param"] == "sampling.colour"


async def test_publishing_to_an_endpoint_answers_nobody(nats_url: str) -> None:
    async with buses_at(nats_url) as buses:
        bus = await buses.started("a")
        bus.serve("ask", "x", StatusRequest, lambda _: REPLY)
        await known(bus)
        bus.publish("x", ASK)
        await until(lambda: bus.counters.dropped == 1)
        assert await bus.request("x", ASK, SubmitReply, timeout_s=DEADLINE_S) == REPLY


async def test_a_service_that_crashed_is_gone_at_once(nats_url: str) -> None:
    async with buses_at(nats_url) as buses:
        client = await buses.started("a")
        async with Proxy(nats_url).open() as url:
            others = buses_of(url)
            service = await others.started("b", close_timeout_s=0.01)
            service.serve("ask", "x", StatusRequest, lambda _: REPLY)
            await known(service)
            assert await client.request("x", ASK, SubmitReply, timeout_s=DEADLINE_S) == REPLY
        # Its connection is cut. Until the server has noticed, requests may still be sent its way.
        error: Exception | None = None
        async with asyncio.timeout(DEADLINE_S):
            while not isinstance(error, PeerGone):
                try:
                    await client.request("x", ASK, SubmitReply, timeout_s=0.05)
                except (PeerGone, PeerTimeout) as caught:
                    error = caught
        await others.close()
