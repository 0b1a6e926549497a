"""What every bus does. A subclass gives a fixture `buses` and, if it wants, another `run_loop`."""

import asyncio
import contextvars
import functools
import inspect
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest

from meshift.schemas import errors
from meshift.schemas.base import Message, pack_tokens
from meshift.schemas.errors import (
    BusClosed,
    InternalError,
    InvalidRequest,
    MeshError,
    MessageTooLarge,
    Overloaded,
    PeerGone,
    PeerTimeout,
)
from meshift.schemas.identity import FrontendRef, Owner
from meshift.schemas.instances import DispatchReply, DispatchRequest, DrainRequest, InstanceGone, StatusRequest
from meshift.schemas.limits import PAYLOAD_BYTES_MAX
from meshift.schemas.requests import ReplayReply, ReplayState, Sampling, Submit, SubmitReply
from meshift.services.bus.base import Bus, Headers, Propagator, ServiceInfo
from meshift.services.bus.settings import BusLimits

DEADLINE_S = 5.0
"""For whatever should happen at once; far above what it takes."""

OWNER = Owner(instance_id="w1", incarnation=1)
FRONTEND = FrontendRef(frontend_id="f1", incarnation=1)
REPLY = SubmitReply(owner=OWNER)
ASK = StatusRequest()

# Just over, and just under, the limit once base64 has made 4 bytes of 3.
TOO_MANY_TOKENS = pack_tokens([7] * (PAYLOAD_BYTES_MAX * 3 // 16 + 1))
MANY_TOKENS = pack_tokens([7] * (PAYLOAD_BYTES_MAX * 3 // 16 - 256))

LEAF_ERRORS = [cls for cls in vars(errors).values() if inspect.isclass(cls) and issubclass(cls, MeshError)]


def numbered(number: int) -> InstanceGone:
    """A message that is told from the others by its number."""
    return InstanceGone(owner=OWNER, reason=str(number))


def submit(prompt: bytes) -> Submit:
    """A request with that prompt."""
    sampling = Sampling(max_new_tokens=1)
    return Submit(request_id="r", attempt=1, owner=OWNER, frontend=FRONTEND, prompt=prompt, sampling=sampling)


def dispatch_request(request_id: str = "r", demand: int = 1) -> DispatchRequest:
    """A request of a scheduler."""
    return DispatchRequest(request_id=request_id, attempt=1, frontend=FRONTEND, model="m", demand=demand)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for it."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 (what others count has no event)
            await asyncio.sleep(0.001)


class Mailbox:
    """A handler that keeps what it gets."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def __call__(self, message: Message) -> None:
        self.messages.append(message)

    async def take(self, count: int) -> list[Any]:
        """The first `count` messages, when they have come."""
        await until(lambda: len(self.messages) >= count)
        return self.messages[:count]

    @property
    def numbers(self) -> list[int]:
        """Of `numbered` messages."""
        return [int(message.reason) for message in self.messages]


class Trace(Propagator):
    """Carries a context variable."""

    def __init__(self) -> None:
        self.current: contextvars.ContextVar[str] = contextvars.ContextVar("trace", default="")

    def inject(self) -> Headers:
        return {"traceparent": self.current.get()} if self.current.get() else {}

    @contextmanager
    def attach(self, headers: Headers) -> Iterator[None]:
        token = self.current.set(headers.get("traceparent", ""))
        try:
            yield
        finally:
            self.current.reset(token)


class Buses:
    """Makes clients of one bus, and closes them."""

    def __init__(self, make: Callable[[str, BusLimits, Propagator | None], Bus]) -> None:
        self._make = make
        self._made: list[Bus] = []

    def new(self, name: str, *, propagator: Propagator | None = None, **limits: Any) -> Bus:
        """A client that isn't started."""
        bus = self._make(name, BusLimits(**limits), propagator)
        self._made.append(bus)
        return bus

    async def started(self, name: str, *, propagator: Propagator | None = None, **limits: Any) -> Bus:
        """A client that is."""
        bus = self.new(name, propagator=propagator, **limits)
        await self.start(bus, name)
        return bus

    async def start(self, bus: Bus, name: str) -> None:
        """Start it as a service."""
        await bus.start(ServiceInfo(name="tester", instance=name))

    async def close(self) -> None:
        """The end of a test."""
        for bus in self._made:
            await bus.close()


async def known(*buses: Bus) -> None:
    """Wait until the server knows what they subscribed to and serve."""
    for bus in buses:
        await bus.flush(timeout_s=DEADLINE_S)


def _on_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run_test(self: "BusSuite", *args: Any, **kwargs: Any) -> None:
        async def main() -> None:
            try:
                await test(self, *args, **kwargs)
            finally:
                for value in kwargs.values():
                    if isinstance(value, Buses):
                        await value.close()

        type(self).run_loop(main())

    return run_test


class BusSuite:
    """The suite. Tests are coroutines; `run_loop` runs each, and the closing of its clients, on one loop."""

    encodes: ClassVar[bool] = True
    """False for a bus that passes objects: it can't see wrong fields."""

    @staticmethod
    def run_loop(main: Coroutine[Any, Any, None]) -> None:
        """Run it to its end."""
        asyncio.run(main)

    def __init_subclass__(cls) -> None:
        for name in dir(cls):
            test = getattr(cls, name)
            if name.startswith("test_") and inspect.iscoroutinefunction(test):
                setattr(cls, name, _on_loop(test))

    @pytest.fixture
    def buses(self) -> Buses:
        raise NotImplementedError

    # Publish and subscribe

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

    # Requests

    async def test_request_and_answer(self, buses: Buses) -> None:
        client, service = await buses.started("a"), await buses.started("b")
        mailbox = Mailbox()

        def handler(message: DispatchRequest) -> DispatchReply:
            mailbox(message)
            return DispatchReply(owner=OWNER, scheduler_id=message.request_id, incarnation=1)

        service.serve("dispatch", "x", DispatchRequest, handler)
        await known(service)
        sent = dispatch_request("r1")
        answer = await client.request("x", sent, DispatchReply, timeout_s=DEADLINE_S)
        assert answer == DispatchReply(owner=OWNER, scheduler_id="r1", incarnation=1)
        assert mailbox.messages == [sent]

    async def test_a_client_may_ask_itself(self, buses: Buses) -> None:
        bus = await buses.started("a")
        bus.serve("ask", "x", StatusRequest, lambda _: REPLY)
        await known(bus)
        assert await bus.request("x", ASK, SubmitReply, timeout_s=DEADLINE_S) == REPLY

    async def test_requests_run_concurrently_and_answers_find_their_own(self, buses: Buses) -> None:
        client, service = await buses.started("a"), await buses.started("b")
        waiting: list[tuple[int, asyncio.Future[None]]] = []

        async def handler(message: DispatchRequest) -> DispatchReply:
            gate = asyncio.get_running_loop().create_future()
            waiting.append((message.demand, gate))
            await gate
            return DispatchReply(owner=OWNER, scheduler_id=str(message.demand), incarnation=1)

        service.serve("dispatch", "x", DispatchRequest, handler)
        await known(service)
        asked = [
            asyncio.ensure_future(client.request("x", dispatch_request(demand=n), DispatchReply, timeout_s=DEADLINE_S))
            for n in range(1, 51)
        ]
        await until(lambda: len(waiting) == 50)
        for _, gate in sorted(waiting, reverse=True):
            gate.set_result(None)
        answers = await asyncio.gather(*asked)
        assert [int(answer.scheduler_id) for answer in answers] == list(range(1, 51))

    async def test_endpoints_of_two_services_share_the_requests(self, buses: Buses) -> None:
        client = await buses.started("a")
        services = [await buses.started(name) for name in ("b", "c")]
        served = [0, 0]

        def handler_of(index: int) -> Callable[[StatusRequest], SubmitReply]:
            def handler(_: StatusRequest) -> SubmitReply:
                served[index] += 1
                return REPLY

            return handler

        for index, service in enumerate(services):
            service.serve("ask", "x", StatusRequest, handler_of(index))
        await known(*services)
        for _ in range(60):
            await client.request("x", ASK, SubmitReply, timeout_s=DEADLINE_S)
        assert sum(served) == 60
        assert min(served) > 0, "2**-59 is the chance that a fair choice leaves one out"
        await services[0].close()
        for _ in range(10):
            await client.request("x", ASK, SubmitReply, timeout_s=DEADLINE_S)
        assert sum(served) == 70

    async def test_a_plain_subscription_sees_requests(self, buses: Buses) -> None:
        client, service = await buses.started("a"), await buses.started("b")
        mailbox = Mailbox()
        service.serve("ask", "x", StatusRequest, lambda _: REPLY)
        client.subscribe("x", StatusRequest, mailbox)
        await known(client, service)
        await client.request("x", ASK, SubmitReply, timeout_s=DEADLINE_S)
        await mailbox.take(1)

    async def test_nobody_serves_it(self, buses: Buses) -> None:
        client, service = await buses.started("a"), await buses.started("b")
        began = asyncio.get_running_loop().time()
        with pytest.raises(PeerGone, match=r"x\.y"):
            await client.request("x.y", ASK, SubmitReply, timeout_s=10 * DEADLINE_S)
        endpoint = service.serve("ask", "x.y", StatusRequest, lambda _: REPLY)
        await known(service)
        await client.request("x.y", ASK, SubmitReply, timeout_s=DEADLINE_S)
        endpoint.close()
        endpoint.close()
        await known(service)
        with pytest.raises(PeerGone):
            await client.request("x.y", ASK, SubmitReply, timeout_s=10 * DEADLINE_S)
        service.serve("ask", "x.y", StatusRequest, lambda _: REPLY)
        await known(service)
        await client.request("x.y", ASK, SubmitReply, timeout_s=DEADLINE_S)
        assert asyncio.get_running_loop().time() - began < DEADLINE_S, "at once, not at the deadline"

    async def test_no_answer_by_the_deadline(self, buses: Buses) -> None:
        client, service = await buses.started("a"), await buses.started("b")
        gate = asyncio.Event()

        async def handler(message: DispatchRequest) -> SubmitReply:
            if message.request_id == "slow":
                await gate.wait()
            return REPLY

        service.serve("ask", "x", DispatchRequest, handler)
        await known(service)
        began = asyncio.get_running_loop().time()
        with pytest.raises(PeerTimeout, match=r"x within 0\.05 s"):
            await client.request("x", dispatch_request("slow"), SubmitReply, timeout_s=0.05)
        assert 0.05 <= asyncio.get_running_loop().time() - began + 1e-6 < DEADLINE_S
        gate.set()
        # The late answer to the first is nobody's.
        assert await client.request("x", dispatch_request("fast"), SubmitReply, timeout_s=DEADLINE_S) == REPLY

    async def test_a_caller_may_give_up(self, buses: Buses) -> None:
        client = await buses.started("a", requests_in_flight_max=1)
        service = await buses.started("b", close_timeout_s=0.01)
        asked = asyncio.Event()

        async def never(_: StatusRequest) -> SubmitReply:
            asked.set()
            await asyncio.Event().wait()
            return REPLY

        service.serve("never", "x", StatusRequest, never)
        service.serve("ask", "y", StatusRequest, lambda _: REPLY)
        await known(service)
        task = asyncio.ensure_future(client.request("x", ASK, SubmitReply, timeout_s=DEADLINE_S))
        async with asyncio.timeout(DEADLINE_S):
            await asked.wait()
        with pytest.raises(Overloaded):
            await client.request("y", ASK, SubmitReply, timeout_s=DEADLINE_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await client.request("y", ASK, SubmitReply, timeout_s=DEADLINE_S) == REPLY

    @pytest.mark.parametrize("error_type", LEAF_ERRORS)
    async def test_an_endpoint_error_arrives_as_itself(self, buses: Buses, error_type: type[MeshError]) -> None:
        client, service = await buses.started("a"), await buses.started("b")

        def refuse(_: StatusRequest) -> SubmitReply:
            raise error_type("because\nof Ü", param="field.1")

        async def refuse_later(_: StatusRequest) -> SubmitReply:
            return refuse(_)

        service.serve("refuse", "x", StatusRequest, refuse)
        service.serve("later", "y", StatusRequest, refuse_later)
        await known(service)
        for subject in ("x", "y"):
            with pytest.raises(MeshError) as caught:
                await client.request(subject, ASK, SubmitReply, timeout_s=DEADLINE_S)
            assert caught.type.code is error_type.code
            assert issubclass(caught.type, error_type)
            assert caught.value.message == "because\nof Ü"
            assert caught.value.param == "field.1"
        assert service.counters.handler_errors == 0

    async def test_a_bug_in_an_endpoint_is_an_internal_error(
        self, buses: Buses, caplog: pytest.LogCaptureFixture
    ) -> None:
        client, service = await buses.started("a"), await buses.started("b")

        async def later(_: StatusRequest) -> SubmitReply:
            raise KeyError("secret")

        def now(_: StatusRequest) -> SubmitReply:
            raise KeyError("secret")

        def nothing(_: StatusRequest) -> Any:
            return None

        service.serve("now", "x", StatusRequest, now)
        service.serve("later", "y", StatusRequest, later)
        service.serve("nothing", "z", StatusRequest, nothing)
        await known(service)
        for count, subject in enumerate("xyz", 1):
            with pytest.raises(InternalError) as caught:
                await client.request(subject, ASK, SubmitReply, timeout_s=DEADLINE_S)
            assert "secret" not in caught.value.message, "what a bug says may be private"
            assert service.counters.handler_errors == count
        assert "secret" in caplog.text

    async def test_a_wrong_answer_is_an_internal_error(self, buses: Buses) -> None:
        client, service = await buses.started("a"), await buses.started("b")
        service.serve("ask", "x", StatusRequest, lambda _: DrainRequest())
        await known(service)
        with pytest.raises(InternalError, match="SubmitReply"):
            await client.request("x", ASK, SubmitReply, timeout_s=DEADLINE_S)

    async def test_a_wrong_request_names_the_field(self, buses: Buses) -> None:
        client, service = await buses.started("a"), await buses.started("b")
        service.serve("dispatch", "x", DispatchRequest, lambda _: REPLY)
        await known(service)
        with pytest.raises(InvalidRequest) as caught:
            await client.request("x", ASK, SubmitReply, timeout_s=DEADLINE_S)
        assert caught.value.param == "kind"
        assert service.counters.invalid == 1
        if self.encodes:
            unchecked = dispatch_request().model_copy(update={"demand": 0})
            with pytest.raises(InvalidRequest, match="demand") as caught:
                await client.request("x", unchecked, SubmitReply, timeout_s=DEADLINE_S)
            assert caught.value.param == "demand"
            assert service.counters.invalid == 2

    # Bounds

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

    # Life and death of a client

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

    # Trace context

    async def test_the_sender_s_context_is_the_handler_s(self, buses: Buses) -> None:
        trace = Trace()
        client, service = await buses.started("a", propagator=trace), await buses.started("b", propagator=trace)
        seen: list[str] = []

        def note(_: Message) -> SubmitReply:
            seen.append(trace.current.get())
            return REPLY

        async def note_later(_: Message) -> SubmitReply:
            await asyncio.sleep(0)
            return note(_)

        service.subscribe("x", InstanceGone, lambda message: seen.append(note(message).kind and trace.current.get()))
        service.serve("now", "y", StatusRequest, note)
        service.serve("later", "z", StatusRequest, note_later)
        await known(service)
        trace.current.set("00-aa-bb-01")
        client.publish("x", numbered(0))
        await until(lambda: len(seen) == 2)
        await client.request("y", ASK, SubmitReply, timeout_s=DEADLINE_S)
        await client.request("z", ASK, SubmitReply, timeout_s=DEADLINE_S)
        assert seen == ["00-aa-bb-01"] * 4
        trace.current.set("")
        await client.request("y", ASK, SubmitReply, timeout_s=DEADLINE_S)
        assert seen[-1] == ""

    async def test_a_client_without_tracing_ignores_headers(self, buses: Buses) -> None:
        trace = Trace()
        client, service = await buses.started("a", propagator=trace), await buses.started("b")
        service.serve("ask", "x", StatusRequest, lambda _: REPLY)
        await known(service)
        trace.current.set("00-aa-bb-01")
        assert await client.request("x", ASK, SubmitReply, timeout_s=DEADLINE_S) == REPLY
