"""NatsBus when its client library fails in the middle of something."""

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import nats
import nats.errors
import pytest
from nats.aio.client import Client

from meshift.schemas.errors import (
    BusClosed,
    InternalError,
    PeerTimeout,
)
from meshift.schemas.instances import InstanceGone, StatusRequest
from meshift.schemas.requests import SubmitReply
from meshift.services.bus.nats_client import BusClient
from tests.contract.bus_kit import ASK, DEADLINE_S, REPLY, Mailbox, known, numbered, until
from tests.contract.nats_kit import (
    Proxy,
    buses_at,
    discover,
    fail_once,
    refuse_the_short_way,
    running_server,
)

pytestmark = pytest.mark.nats


@pytest.fixture(scope="module")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that all tests here share."""
    with running_server(tmp_path_factory.mktemp("nats")) as url:
        yield url


async def test_a_connection_that_breaks_while_it_is_set_up_is_made_again(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = fail_once(monkeypatch, "subscribe", nats.errors.ConnectionClosedError())
    async with buses_at(nats_url) as buses:
        bus = await buses.started("a")
        assert not left
        bus.serve("ask", "x", StatusRequest, lambda _: REPLY)
        await known(bus)
        assert await bus.request("x", ASK, SubmitReply, timeout_s=DEADLINE_S) == REPLY


async def test_what_is_unforeseen_fails_the_start_but_not_a_replacement(
    nats_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    proxy = Proxy(nats_url)
    async with proxy.open() as url, buses_at(url) as buses:
        fail_once(monkeypatch, "subscribe", RuntimeError("quite unforeseen"))
        bus = buses.new("a")
        with pytest.raises(RuntimeError, match="quite unforeseen"):
            await buses.start(bus, "a")
        await buses.start(bus, "a")
        left = fail_once(monkeypatch, "subscribe", RuntimeError("unforeseen again"))
        proxy.say(b"-ERR 'Maximum Connections Exceeded'\r\n")
        await until(lambda: bus.counters.reconnects == 1)
        assert not left
        assert "unforeseen again" in caplog.text
        await known(bus)


@pytest.mark.parametrize(
    "error", [nats.errors.OutboundBufferLimitError(), nats.errors.ConnectionClosedError()], ids=["buffer", "closed"]
)
async def test_a_message_that_meets_a_breaking_connection_waits(
    nats_url: str, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async with buses_at(nats_url) as buses:
        bus = await buses.started("a")
        mailbox = Mailbox()
        bus.subscribe("x", InstanceGone, mailbox)
        await known(bus)
        refuse_the_short_way(monkeypatch)
        left = fail_once(monkeypatch, "publish", error)
        for number in range(3):
            bus.publish("x", numbered(number))
        await mailbox.take(3)
        assert mailbox.numbers == [0, 1, 2]
        assert not left
        assert bus.counters.dropped == 0


@pytest.mark.parametrize("seed", range(3))
async def test_messages_of_both_ways_keep_their_order(
    nats_url: str, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng, original, refused = random.Random(seed), BusClient.publish_now, []

    def publish_now(self: BusClient, *message: Any) -> bool:
        if rng.random() < 0.1:
            refused.append(message)
            return False
        return original(self, *message)

    async with buses_at(nats_url) as buses:
        bus = await buses.started("a")
        mailbox = Mailbox()
        bus.subscribe("x", InstanceGone, mailbox)
        await known(bus)
        monkeypatch.setattr(BusClient, "publish_now", publish_now)
        for number in range(300):
            bus.publish("x", numbered(number))
            if rng.random() < 0.1:
                await asyncio.sleep(0)
        await mailbox.take(300)
        assert mailbox.numbers == list(range(300)), f"seed {seed}"
        assert 0 < len(refused) < 100


async def test_a_message_that_can_t_be_sent_is_counted_and_its_caller_told(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with buses_at(nats_url) as buses:
        bus = await buses.started("a")
        refuse_the_short_way(monkeypatch)
        fail_once(monkeypatch, "publish", nats.errors.BadHeaderError("k"))
        bus.publish("x", ASK)
        await until(lambda: bus.counters.dropped == 1)
        fail_once(monkeypatch, "publish", nats.errors.BadHeaderError("k"))
        with pytest.raises(InternalError, match="BadHeaderError"):
            await bus.request("x", ASK, SubmitReply, timeout_s=DEADLINE_S)


async def test_a_subscription_closed_while_it_is_set_up_is_taken_back(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Client.subscribe
    raws: list[Any] = []

    async def subscribe(self: Client, subject: str, *args: Any, **kwargs: Any) -> Any:
        raw = await original(self, subject, *args, **kwargs)
        if subject == "x":
            subscription.close()
            raws.append(raw)
        return raw

    monkeypatch.setattr(Client, "subscribe", subscribe)
    async with buses_at(nats_url) as buses:
        bus = await buses.started("a")
        mailbox, other = Mailbox(), Mailbox()
        subscription = bus.subscribe("x", InstanceGone, mailbox)
        bus.subscribe("*", InstanceGone, other)
        bus.publish("x", numbered(1))
        await other.take(1)
        assert mailbox.numbers == []
        with pytest.raises(nats.errors.BadSubscriptionError):
            await raws[0].unsubscribe()


async def test_start_tells_the_last_errors(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter(range(1_000))

    async def connect(self: Client, *args: Any, **options: Any) -> None:
        number = next(numbers)
        await asyncio.sleep(DEADLINE_S * (number == 5))
        raise nats.errors.Error(f"error {number}")

    monkeypatch.setattr(Client, "connect", connect)
    async with buses_at(nats_url, connect_timeout_s=0.2, reconnect_wait_s_max=0.001) as buses:
        with pytest.raises(PeerTimeout, match=r"last errors: Error: error 2; Error: error 3; Error: error 4$"):
            await buses.started("a")


async def test_a_client_closed_while_it_starts_leaves(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = asyncio.Event()
    original = Client.connect

    async def connect(self: Client, *args: Any, **options: Any) -> None:
        await gate.wait()
        await original(self, *args, **options)

    monkeypatch.setattr(Client, "connect", connect)
    async with buses_at(nats_url) as buses:
        bus = buses.new("a")
        starting = asyncio.ensure_future(buses.start(bus, "a"))
        await asyncio.sleep(0)
        await bus.close()
        gate.set()
        with pytest.raises(BusClosed):
            await starting
    assert await discover(nats_url, "$SRV.PING") == []


@pytest.mark.parametrize("step", ["connect", "subscribe", "flush"])
async def test_a_start_that_is_cancelled_leaves_nothing(
    nats_url: str, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    reached, original = asyncio.Event(), getattr(Client, step)

    async def done_and_not_answered(self: Client, *args: Any, **options: Any) -> Any:
        result = await original(self, *args, **options)
        if not reached.is_set():
            reached.set()
            await asyncio.Event().wait()
        return result

    monkeypatch.setattr(Client, step, done_and_not_answered)
    async with buses_at(nats_url) as buses:
        bus = buses.new("a")
        starting = asyncio.ensure_future(buses.start(bus, "a"))
        async with asyncio.timeout(DEADLINE_S):
            await reached.wait()
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert await discover(nats_url, "$SRV.PING") == []
        await buses.start(bus, "a")
        assert len(await discover(nats_url, "$SRV.PING")) == 1
