"""What every bus does: publishing."""

import pytest

from meshift.schemas.base import pack_tokens
from meshift.schemas.errors import (
    InvalidRequest,
)
from meshift.schemas.instances import InstanceGone, StatusRequest
from meshift.schemas.requests import Submit, SubmitReply
from tests.contract.bus_kit import (
    ASK,
    DEADLINE_S,
    REPLY,
    Buses,
    LoopSuite,
    Mailbox,
    known,
    numbered,
    submit,
    until,
)


class PublishSuite(LoopSuite):
    """Publish and subscribe."""

    async def test_a_message_arrives_as_it_was_sent(self, buses: Buses) -> None:
        publisher, subscriber = await buses.started("a"), await buses.started("b")
        mailbox = Mailbox()
        subscriber.subscribe("x.y", Submit, mailbox)
        await known(subscriber)
        sent = submit(pack_tokens([1, -1, 2**31 - 1]))
        publisher.publish("x.y", sent)
        assert await mailbox.take(1) == [sent]
        assert publisher.counters.published == 1
        assert subscriber.counters.received == 1

    async def test_interest_from_before_the_start_counts(self, buses: Buses) -> None:
        publisher, subscriber = await buses.started("a"), buses.new("b")
        mailbox = Mailbox()
        subscriber.subscribe("x", InstanceGone, mailbox)
        subscriber.serve("ask", "y", StatusRequest, lambda _: REPLY)
        await buses.start(subscriber, "b")
        publisher.publish("x", numbered(1))
        assert await publisher.request("y", ASK, SubmitReply, timeout_s=DEADLINE_S) == REPLY
        await mailbox.take(1)

    async def test_wildcards(self, buses: Buses) -> None:
        publisher, subscriber = await buses.started("a"), await buses.started("b")
        boxes = {pattern: Mailbox() for pattern in ("x.*.z", "x.>", "x.y.z", ">", "x.*")}
        for pattern, mailbox in boxes.items():
            subscriber.subscribe(pattern, InstanceGone, mailbox)
        await known(subscriber)
        for number, subject in enumerate(["x.y.z", "x.y.w", "x.y", "x", "x.w.z", "x.y.z.w", "end"]):
            publisher.publish(subject, numbered(number))
        await boxes[">"].take(7)
        assert boxes["x.*.z"].numbers == [0, 4]
        assert boxes["x.>"].numbers == [0, 1, 2, 4, 5]
        assert boxes["x.y.z"].numbers == [0]
        assert boxes["x.*"].numbers == [2]
        assert boxes[">"].numbers == list(range(7))

    async def test_order_is_kept(self, buses: Buses) -> None:
        publisher, subscriber = await buses.started("a"), await buses.started("b")
        mailbox = Mailbox()
        subscriber.subscribe("x.*", InstanceGone, mailbox)
        await known(subscriber)
        for number in range(1_000):
            publisher.publish(f"x.{number % 3}", numbered(number))
        await mailbox.take(1_000)
        assert mailbox.numbers == list(range(1_000))

    async def test_all_subscribers_get_it_and_so_does_the_publisher(self, buses: Buses) -> None:
        clients = [await buses.started(f"c{index}") for index in range(4)]
        boxes = [Mailbox() for _ in range(8)]
        for index, mailbox in enumerate(boxes):
            clients[index % 4].subscribe("x", InstanceGone, mailbox)
        await known(*clients)
        clients[0].publish("x", numbered(5))
        for mailbox in boxes:
            await mailbox.take(1)
        assert [mailbox.numbers for mailbox in boxes] == [[5]] * 8

    async def test_a_closed_subscription_gets_nothing(self, buses: Buses) -> None:
        publisher, subscriber = await buses.started("a"), await buses.started("b")
        closed, closed_at_once, other = Mailbox(), Mailbox(), Mailbox()
        subscription = subscriber.subscribe("x", InstanceGone, closed)
        subscriber.subscribe("x", InstanceGone, closed_at_once).close()
        subscriber.subscribe("x", InstanceGone, other)
        await known(subscriber)
        publisher.publish("x", numbered(0))
        await closed.take(1)
        subscription.close()
        subscription.close()
        publisher.publish("x", numbered(1))
        await other.take(2)
        assert closed.numbers == [0]
        assert closed_at_once.numbers == []

    async def test_a_handler_may_close_its_own_subscription(self, buses: Buses) -> None:
        publisher, subscriber = await buses.started("a"), await buses.started("b")
        once, other = Mailbox(), Mailbox()

        def handler(message: InstanceGone) -> None:
            once(message)
            subscription.close()

        subscription = subscriber.subscribe("x", InstanceGone, handler)
        subscriber.subscribe("x", InstanceGone, other)
        await known(subscriber)
        for number in range(3):
            publisher.publish("x", numbered(number))
        await other.take(3)
        assert once.numbers == [0]

    async def test_a_handler_that_raises_is_counted_and_called_again(
        self, buses: Buses, caplog: pytest.LogCaptureFixture
    ) -> None:
        publisher, subscriber = await buses.started("a"), await buses.started("b")
        mailbox = Mailbox()

        def fail(message: InstanceGone) -> None:
            mailbox(message)
            raise ZeroDivisionError("no such luck")

        subscriber.subscribe("x", InstanceGone, fail)
        await known(subscriber)
        for number in range(3):
            publisher.publish("x", numbered(number))
        await until(lambda: subscriber.counters.handler_errors == 3)
        assert mailbox.numbers == [0, 1, 2]
        assert "no such luck" in caplog.text, "the traceback is logged"
        assert caplog.text.count("Traceback") == 1, "but not for each message"

    async def test_a_wrong_message_is_counted_and_others_go_on(self, buses: Buses) -> None:
        publisher, subscriber = await buses.started("a"), await buses.started("b")
        mailbox = Mailbox()
        subscriber.subscribe("x", InstanceGone, mailbox)
        await known(subscriber)
        publisher.publish("x", ASK)
        publisher.publish("x", numbered(1))
        await mailbox.take(1)
        assert mailbox.numbers == [1]
        assert subscriber.counters.invalid == 1
        assert subscriber.counters.received == 2

    @pytest.mark.parametrize("subject", ["", "x..y", ".x", "x.", "x y", "x.*", "x.>", "x\r\nPUB y 0"])
    async def test_subjects_to_send_to_are_checked(self, buses: Buses, subject: str) -> None:
        bus = await buses.started("a")
        with pytest.raises(InvalidRequest):
            bus.publish(subject, ASK)
        with pytest.raises(InvalidRequest):
            await bus.request(subject, ASK, SubmitReply, timeout_s=DEADLINE_S)
        with pytest.raises(InvalidRequest):
            bus.serve("ask", subject, StatusRequest, lambda _: REPLY)

    @pytest.mark.parametrize("pattern", ["", "x..y", "x.>.y", "x.a*", "x.>a", "x y", "x\n"])
    async def test_patterns_are_checked(self, buses: Buses, pattern: str) -> None:
        bus = await buses.started("a")
        with pytest.raises(InvalidRequest):
            bus.subscribe(pattern, StatusRequest, Mailbox())
