"""NatsBus against a real nats-server: the suite, and others on the same bus."""

import asyncio
import json
import logging
from collections.abc import Iterator

import pytest
from nats.micro import add_service
from nats.micro.request import Request, ServiceError

from meshift.schemas.errors import (
    InternalError,
    InvalidRequest,
    Overloaded,
    PeerGone,
    PeerTimeout,
)
from meshift.schemas.instances import InstanceGone, StatusRequest
from meshift.schemas.requests import Submit, SubmitReply
from meshift.services.bus.base import ServiceInfo
from tests.contract.bus_kit import (
    ASK,
    DEADLINE_S,
    REPLY,
    Buses,
    Mailbox,
    known,
    numbered,
    submit,
    until,
)
from tests.contract.bus_suite import BusSuite
from tests.contract.nats_kit import (
    Proxy,
    buses_at,
    buses_of,
    discover,
    raw_client,
    running_server,
)

pytestmark = pytest.mark.nats


@pytest.fixture(scope="module")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that all tests here share."""
    with running_server(tmp_path_factory.mktemp("nats")) as url:
        yield url


class TestNatsBus(BusSuite):
    """The suite on NATS."""

    @pytest.fixture
    def buses(self, nats_url: str) -> Buses:
        return buses_of(nats_url)


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
        (ping,) = await discover(nats_url, "$SRV.PING.worker")
        assert ping["metadata"] == {"model": "m", "instance": "w1"}
        (info,) = await discover(nats_url, f"$SRV.INFO.worker.{ping['id']}")
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
        (stats,) = await discover(nats_url, "$SRV.STATS.worker")
        submits, refusals = stats["endpoints"]
        assert (submits["num_requests"], submits["num_errors"]) == (3, 0)
        assert (refusals["num_requests"], refusals["num_errors"]) == (1, 1)
        assert refusals["last_error"] == "InvalidRequest: no"
        assert refusals["average_processing_time"] > 40_000_000, "the time of the handler, in ns"
        assert refusals["data"] == {"running": 0, "overloaded": 0}
    assert await discover(nats_url, "$SRV.PING.worker") == []


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
