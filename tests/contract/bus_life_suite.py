"""What every bus does: bounds, and the life of a client."""

import asyncio

import pytest

from meshift.schemas.errors import (
    BusClosed,
    MessageTooLarge,
    Overloaded,
    PeerGone,
    PeerTimeout,
)
from meshift.schemas.instances import DispatchRequest, InstanceGone, StatusRequest
from meshift.schemas.limits import PAYLOAD_BYTES_MAX
from meshift.schemas.requests import ReplayReply, ReplayState, Submit, SubmitReply
from tests.contract.bus_kit import (
    ASK,
    DEADLINE_S,
    MANY_TOKENS,
    OWNER,
    REPLY,
    TOO_MANY_TOKENS,
    Buses,
    LoopSuite,
    Mailbox,
    dispatch_request,
    known,
    numbered,
    submit,
    until,
)


class LifeSuite(LoopSuite):
    """Bounds, start and close."""

    async def test_too_large_a_message_fails_at_the_sender(self, buses: Buses) -> None:
        client, service = await buses.started("a"), await buses.started("b")
        mailbox = Mailbox()
        service.subscribe("x", Submit, mailbox)
        service.serve("submit", "y", Submit, lambda _: REPLY)
        await known(service)
        with pytest.raises(MessageTooLarge, match=str(PAYLOAD_BYTES_MAX)):
            client.publish("x", submit(TOO_MANY_TOKENS))
        with pytest.raises(MessageTooLarge):
            await client.request("y", submit(TOO_MANY_TOKENS), SubmitReply, timeout_s=DEADLINE_S)
        # Neither harms what follows.
        client.publish("x", submit(b""))
        await mailbox.take(1)
        assert await client.request("y", submit(b""), SubmitReply, timeout_s=DEADLINE_S) == REPLY
        assert client.counters.published == 1

    async def test_the_largest_message_passes_both_ways(self, buses: Buses) -> None:
        client, service = await buses.started("a"), await buses.started("b")

        def echo(message: Submit) -> ReplayReply:
            return ReplayReply(owner=OWNER, state=ReplayState.RUNNING, tokens=message.prompt)

        service.serve("echo", "x", Submit, echo)
        await known(service)
        answer = await client.request("x", submit(MANY_TOKENS), ReplayReply, timeout_s=DEADLINE_S)
        assert answer.tokens == MANY_TOKENS

    async def test_too_large_an_answer_is_an_error_at_the_caller(self, buses: Buses) -> None:
        client, service = await buses.started("a"), await buses.started("b")
        large = ReplayReply(owner=OWNER, state=ReplayState.RUNNING, tokens=TOO_MANY_TOKENS)

        async def later(_: StatusRequest) -> ReplayReply:
            return large

        service.serve("now", "x", StatusRequest, lambda _: large)
        service.serve("later", "y", StatusRequest, later)
        await known(service)
        for subject in ("x", "y"):
            with pytest.raises(MessageTooLarge):
                await client.request(subject, ASK, ReplayReply, timeout_s=DEADLINE_S)

    async def test_what_is_published_before_the_connection_waits_in_a_bounded_queue(self, buses: Buses) -> None:
        subscriber, publisher = await buses.started("b"), buses.new("a", publish_queue_max=10)
        mailbox = Mailbox()
        subscriber.subscribe("x", InstanceGone, mailbox)
        await known(subscriber)
        for number in range(10):
            publisher.publish("x", numbered(number))
        with pytest.raises(Overloaded):
            publisher.publish("x", numbered(10))
        with pytest.raises(Overloaded):
            await publisher.request("y", ASK, SubmitReply, timeout_s=DEADLINE_S)
        await buses.start(publisher, "a")
        await known(publisher)
        publisher.publish("x", numbered(11))
        await mailbox.take(11)
        assert mailbox.numbers == [*range(10), 11]
        assert publisher.counters.published == 11

    async def test_a_request_before_the_connection_waits_for_it(self, buses: Buses) -> None:
        service, client = await buses.started("b"), buses.new("a")
        served = Mailbox()

        def handler(message: DispatchRequest) -> SubmitReply:
            served(message)
            return REPLY

        service.serve("ask", "x", DispatchRequest, handler)
        await known(service)
        with pytest.raises(PeerTimeout):
            await client.request("x", dispatch_request("given-up"), SubmitReply, timeout_s=0.01)
        with pytest.raises(PeerTimeout):
            await client.flush(timeout_s=0.01)
        task = asyncio.ensure_future(client.request("x", dispatch_request("waits"), SubmitReply, timeout_s=DEADLINE_S))
        await asyncio.sleep(0)
        await buses.start(client, "a")
        assert await task == REPLY
        assert [message.request_id for message in served.messages] == ["waits"], "what was given up is not sent"

    async def test_a_full_subscription_drops_and_counts(self, buses: Buses) -> None:
        publisher, subscriber = await buses.started("a"), await buses.started("b", subscription_queue_max=8)
        mailbox = Mailbox()
        subscriber.subscribe("x", InstanceGone, mailbox)
        await known(subscriber)
        for number in range(500):
            publisher.publish("x", numbered(number))
        counters = subscriber.counters
        await until(lambda: counters.dropped + counters.received == 500)
        assert counters.dropped > 0
        assert mailbox.numbers == sorted(mailbox.numbers)
        publisher.publish("x", numbered(500))
        await until(lambda: mailbox.numbers[-1] == 500)

    async def test_an_endpoint_serves_so_many_at_once(self, buses: Buses) -> None:
        client, service = await buses.started("a"), await buses.started("b", endpoint_concurrency_max=2)
        gate, running = asyncio.Event(), Mailbox()

        async def handler(message: StatusRequest) -> SubmitReply:
            running(message)
            await gate.wait()
            return REPLY

        service.serve("ask", "x", StatusRequest, handler)
        await known(service)
        asked = [asyncio.ensure_future(client.request("x", ASK, SubmitReply, timeout_s=DEADLINE_S)) for _ in range(2)]
        await running.take(2)
        with pytest.raises(Overloaded, match="ask"):
            await client.request("x", ASK, SubmitReply, timeout_s=DEADLINE_S)
        gate.set()
        assert await asyncio.gather(*asked) == [REPLY, REPLY]
        assert await client.request("x", ASK, SubmitReply, timeout_s=DEADLINE_S) == REPLY

    async def test_after_close_all_is_refused(self, buses: Buses) -> None:
        bus = await buses.started("a")
        await bus.close()
        await bus.close()
        with pytest.raises(BusClosed):
            bus.publish("x", ASK)
        with pytest.raises(BusClosed):
            await bus.request("x", ASK, SubmitReply, timeout_s=DEADLINE_S)
        with pytest.raises(BusClosed):
            bus.subscribe("x", StatusRequest, Mailbox())
        with pytest.raises(BusClosed):
            bus.serve("ask", "x", StatusRequest, lambda _: REPLY)
        with pytest.raises(BusClosed):
            await bus.flush(timeout_s=DEADLINE_S)
        with pytest.raises(BusClosed):
            await buses.start(bus, "a")

    async def test_close_without_start(self, buses: Buses) -> None:
        bus = buses.new("a")
        bus.publish("x", ASK)
        await bus.close()
        with pytest.raises(BusClosed):
            bus.publish("x", ASK)

    async def test_a_second_start_is_a_bug(self, buses: Buses) -> None:
        bus = await buses.started("a")
        with pytest.raises(RuntimeError):
            await buses.start(bus, "a")

    async def test_a_second_endpoint_on_a_subject_is_a_bug(self, buses: Buses) -> None:
        bus = await buses.started("a")
        bus.serve("ask", "x", StatusRequest, lambda _: REPLY)
        with pytest.raises(ValueError, match="x already"):
            bus.serve("ask2", "x", StatusRequest, lambda _: REPLY)

    async def test_close_sends_what_was_published(self, buses: Buses) -> None:
        publisher, subscriber = await buses.started("a"), await buses.started("b")
        mailbox = Mailbox()
        subscriber.subscribe("x", InstanceGone, mailbox)
        await known(subscriber)
        for number in range(500):
            publisher.publish("x", numbered(number))
        await publisher.close()
        await mailbox.take(500)
        assert mailbox.numbers == list(range(500))

    async def test_a_closed_client_gets_nothing(self, buses: Buses) -> None:
        publisher, subscriber, other = await buses.started("a"), await buses.started("b"), await buses.started("c")
        closed, mailbox = Mailbox(), Mailbox()
        subscriber.subscribe("x", InstanceGone, closed)
        other.subscribe("x", InstanceGone, mailbox)
        await known(subscriber, other)
        await asyncio.gather(subscriber.close(), subscriber.close())
        publisher.publish("x", numbered(0))
        await mailbox.take(1)
        assert closed.numbers == []

    async def test_requests_that_wait_at_close_fail(self, buses: Buses) -> None:
        client, service = await buses.started("a"), await buses.started("b", close_timeout_s=0.01)
        asked = Mailbox()

        async def never(message: StatusRequest) -> SubmitReply:
            asked(message)
            await asyncio.Event().wait()
            return REPLY

        service.serve("never", "x", StatusRequest, never)
        await known(service)
        task = asyncio.ensure_future(client.request("x", ASK, SubmitReply, timeout_s=10 * DEADLINE_S))
        await asked.take(1)
        await client.close()
        with pytest.raises(BusClosed):
            await task

    async def test_close_lets_handlers_end(self, buses: Buses) -> None:
        client, service = await buses.started("a"), await buses.started("b")
        gate, asked = asyncio.Event(), Mailbox()

        async def handler(message: StatusRequest) -> SubmitReply:
            asked(message)
            await gate.wait()
            return REPLY

        service.serve("ask", "x", StatusRequest, handler)
        await known(service)
        task = asyncio.ensure_future(client.request("x", ASK, SubmitReply, timeout_s=DEADLINE_S))
        await asked.take(1)
        closing = asyncio.ensure_future(service.close())
        await asyncio.sleep(0)
        gate.set()
        assert await task == REPLY
        await closing

    async def test_close_ends_handlers_that_don_t(self, buses: Buses) -> None:
        client, service = await buses.started("a"), await buses.started("b", close_timeout_s=0.01)
        asked = Mailbox()

        async def never(message: StatusRequest) -> SubmitReply:
            asked(message)
            await asyncio.Event().wait()
            return REPLY

        service.serve("never", "x", StatusRequest, never)
        await known(service)
        task = asyncio.ensure_future(client.request("x", ASK, SubmitReply, timeout_s=10 * DEADLINE_S))
        await asked.take(1)
        await service.close()
        with pytest.raises(PeerGone):
            await task
