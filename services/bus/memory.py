"""The bus within one process: for simulation, for tests, for a mesh without a server.

A `MemoryNetwork` stands for the server and the wires, a `MemoryBus` is one service's client. Both work on any event
loop; on a virtual one, with seeded generators, everything that happens is the same each time.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from meshift.schemas.base import Message
from meshift.schemas.errors import BusClosed, ErrorReply, MessageTooLarge, Overloaded, PeerGone
from meshift.services.bus.base import (
    BusCounters,
    EndpointHandler,
    Handler,
    Headers,
    Propagator,
    ServiceInfo,
    Subscription,
)
from meshift.services.bus.codec import check_packed_size, encode
from meshift.services.bus.lifecycle import ClientEvent, ClientState, next_state
from meshift.services.bus.memory_network import (
    EndpointInlet,
    MemoryNetwork,
    Mode,
    Payload,
    ReplyTo,
    SubscriptionInlet,
)
from meshift.services.bus.pending import PendingRequests
from meshift.services.bus.receiver import Answer, Endpoint, Reception, Subscriber, open_answer
from meshift.services.bus.settings import BusLimits
from meshift.services.bus.subjects import check_pattern, check_subject
from meshift.services.bus.tasks import AnswerTasks

__all__ = ["MemoryBus", "MemoryNetwork", "Mode"]

MessageT = TypeVar("MessageT", bound=Message)
ReplyT = TypeVar("ReplyT", bound=Message)

_FLUSHED = Answer(b"")


class MemoryBus:
    """One service's client; see `Bus` for what the methods promise.

    A client that isn't connected (not started yet, or `MemoryNetwork.disconnect`ed) queues what it sends, and without
    its knowing a killed one sends nothing. In `Mode.DIRECT` messages are passed as objects, and of their sizes only
    the packed tokens are checked: nothing else in a message grows with a prompt, and encoding would cost most of the
    time of a simulation.
    """

    def __init__(
        self,
        network: MemoryNetwork,
        name: str,
        *,
        propagator: Propagator | None = None,
        limits: BusLimits | None = None,
    ) -> None:
        self.name = name
        self._network = network
        self._limits = limits or BusLimits()
        self._reception = Reception(name, propagator, network.decoder)
        self._state = ClientState.NEW
        self._closing = False
        self._closed = asyncio.Event()
        self._unsent: deque[Callable[[], None]] = deque()
        self._pending: PendingRequests[Answer] = PendingRequests(self._limits.requests_in_flight_max)
        self._subscribers: dict[Subscriber[Any], SubscriptionInlet | None] = {}
        self._endpoints: dict[Endpoint[Any], EndpointInlet | None] = {}
        self._tasks = AnswerTasks()

    @property
    def counters(self) -> BusCounters:
        """Live counters."""
        return self._reception.counters

    async def start(self, service: ServiceInfo) -> None:
        """Take part. Raises ValueError if another client has this name, RuntimeError if started before."""
        self._check_open()
        state = next_state(self._state, ClientEvent.START)
        self._network.line.bind(asyncio.get_running_loop())
        self._network.join(self)
        self._state = state
        self._connect()

    async def close(self) -> None:
        """Leave: endpoints first, then, when their handlers at work have ended, the rest."""
        if self._killed():
            return
        if self._closing:
            await self._closed.wait()
            return
        self._closing = True
        try:
            for endpoint in list(self._endpoints):
                self._stop_serving(endpoint)
            await self._tasks.finish(self._limits.close_timeout_s)
        finally:
            if not self._killed():  # not while it waited for its handlers either
                self._leave(ClientEvent.CLOSE)
            self._pending.close()
            self._closed.set()

    async def flush(self, *, timeout_s: float) -> None:
        """At once when connected; else when connected again."""
        self._check_open()
        token, future = self._pending.open("the network", timeout_s)
        try:
            self._send(partial(self._pending.resolve, token, _FLUSHED))
            await future
        finally:
            self._pending.discard(token)

    def publish(self, subject: str, message: Message) -> None:
        """Send to all subscribers."""
        check_subject(subject)
        payload, headers = self._pack(message), self._reception.inject()
        if self._state is ClientState.CONNECTED:
            self._network.publish(self.name, subject, payload, headers)
        else:
            self._check_open()
            self._send(partial(self._network.publish, self.name, subject, payload, headers))
        self._reception.counters.published += 1

    async def request(self, subject: str, message: Message, reply_type: type[ReplyT], *, timeout_s: float) -> ReplyT:
        """Ask an endpoint."""
        self._check_open()
        check_subject(subject)
        payload, headers = self._pack(message), self._reception.inject()
        token, future = self._pending.open(subject, timeout_s)
        try:
            if self._state is ClientState.CONNECTED:
                self._network.request(subject, payload, headers, ReplyTo(self, token))
            else:
                self._send(partial(self._request_later, subject, payload, headers, token))
            answer = await future
        finally:
            self._pending.discard(token)
        return open_answer(reply_type, subject, answer)

    def subscribe(self, subject: str, message_type: type[MessageT], handler: Handler[MessageT]) -> Subscription:
        """Call `handler` for each message."""
        self._check_open()
        subscriber = Subscriber(self._reception, check_pattern(subject), message_type, handler)
        self._subscribers[subscriber] = None
        if self._state is ClientState.CONNECTED:
            self._add_subscriber(subscriber)
        return _Handle(partial(self._unsubscribe, subscriber))

    def serve(
        self, name: str, subject: str, message_type: type[MessageT], handler: EndpointHandler[MessageT]
    ) -> Subscription:
        """Answer requests."""
        self._check_open()
        if any(endpoint.subject == subject for endpoint in self._endpoints):
            raise ValueError(f"bus client {self.name} serves {subject} already")
        concurrency_max = self._limits.endpoint_concurrency_max
        endpoint = Endpoint(
            self._reception, name, check_subject(subject), message_type, handler, concurrency_max=concurrency_max
        )
        self._endpoints[endpoint] = None
        if self._state is ClientState.CONNECTED:
            self._add_endpoint(endpoint)
        return _Handle(partial(self._stop_serving, endpoint))

    def on_answer(self, token: int, answer: Answer) -> None:
        """The network brings an answer."""
        if self._state is ClientState.CONNECTED:
            self._pending.resolve(token, answer)

    def on_no_responders(self, token: int) -> None:
        """The network found no endpoint."""
        if self._state is ClientState.CONNECTED:
            self._pending.gone(token)

    def on_disconnect(self) -> None:
        """The network is lost."""
        self._state = next_state(self._state, ClientEvent.DISCONNECT)
        self._remove_inlets()

    def on_reconnect(self) -> None:
        """The network is found again."""
        self._state = next_state(self._state, ClientEvent.RECONNECT)
        self._reception.counters.reconnects += 1
        self._connect()

    def on_kill(self) -> None:
        """The process dies, but its code doesn't know: it goes on talking to nobody."""
        self._leave(ClientEvent.KILL)
        self._closed.set()

    def _killed(self) -> bool:
        return self._state is ClientState.KILLED

    def _check_open(self) -> None:
        if self._state is ClientState.CLOSED:
            raise BusClosed(f"bus client {self.name} is closed")

    def _pack(self, message: Message) -> Payload:
        if self._network.mode is Mode.VALIDATE:
            return encode(message)
        check_packed_size(message)
        return message

    def _send(self, send: Callable[[], None]) -> None:
        if self._state is ClientState.CONNECTED:
            send()
        elif self._state is not ClientState.KILLED:
            if len(self._unsent) >= self._limits.publish_queue_max:
                raise Overloaded(f"{len(self._unsent)} messages of bus client {self.name} wait for the connection")
            self._unsent.append(send)

    def _request_later(self, subject: str, payload: Payload, headers: Headers | None, token: int) -> None:
        if token in self._pending:
            self._network.request(subject, payload, headers, ReplyTo(self, token))

    def _connect(self) -> None:
        for subscriber in self._subscribers:
            self._add_subscriber(subscriber)
        for endpoint in self._endpoints:
            self._add_endpoint(endpoint)
        while self._unsent:
            self._unsent.popleft()()

    def _leave(self, event: ClientEvent) -> None:
        self._state = next_state(self._state, event)
        self._remove_inlets()
        self._subscribers.clear()
        self._endpoints.clear()
        self._unsent.clear()
        self._network.leave(self)

    def _add_subscriber(self, subscriber: Subscriber[Any]) -> None:
        queue_max = self._limits.subscription_queue_max
        on_drop = partial(self._on_drop, subscriber.subject)
        inlet = SubscriptionInlet(self, subscriber.subject, subscriber.deliver, on_drop, queue_max)
        self._subscribers[subscriber] = inlet
        self._network.add_subscription(inlet)

    def _add_endpoint(self, endpoint: Endpoint[Any]) -> None:
        inlet = EndpointInlet(self, endpoint.subject, partial(self._on_request, endpoint))
        self._endpoints[endpoint] = inlet
        self._network.add_endpoint(inlet)

    def _remove_inlets(self) -> None:
        for subscriber, inlet in self._subscribers.items():
            if inlet is not None:
                self._network.remove_subscription(inlet)
                self._subscribers[subscriber] = None
        for endpoint, endpoint_inlet in self._endpoints.items():
            if endpoint_inlet is not None:
                endpoint_inlet.cut = True
                self._network.remove_endpoint(endpoint_inlet)
                self._endpoints[endpoint] = None

    def _unsubscribe(self, subscriber: Subscriber[Any]) -> None:
        inlet = self._subscribers.pop(subscriber, None)
        if inlet is not None:
            self._network.remove_subscription(inlet)

    def _stop_serving(self, endpoint: Endpoint[Any]) -> None:
        endpoint.closed = True
        inlet = self._endpoints.pop(endpoint, None)
        if inlet is not None:
            self._network.remove_endpoint(inlet)

    def _on_drop(self, subject: str) -> None:
        self._reception.counters.dropped += 1
        self._reception.log.report(("dropped", subject), f"slow consumer: the queue of {subject} is full")

    def _on_request(
        self, endpoint: Endpoint[Any], payload: Payload, headers: Headers | None, reply_to: ReplyTo
    ) -> None:
        if self._state not in (ClientState.CONNECTED, ClientState.CLOSED):
            return
        if endpoint.closed:
            gone = self._pack(ErrorReply.of(PeerGone(f"{endpoint.subject} is served no more")))
            self._network.answer(self.name, endpoint.subject, reply_to, Answer(gone, is_error=True))
            return
        answer = endpoint.begin(payload, headers)
        if isinstance(answer, Message):
            self._answer(endpoint.subject, reply_to, answer)
        else:
            self._tasks.spawn(self._answer_later(endpoint.subject, reply_to, answer))

    async def _answer_later(self, subject: str, reply_to: ReplyTo, answer: Coroutine[Any, Any, Message]) -> None:
        try:
            message = await answer
        except asyncio.CancelledError:
            self._answer(subject, reply_to, ErrorReply.of(PeerGone(f"{self.name} left before it could answer")))
            raise
        self._answer(subject, reply_to, message)

    def _answer(self, subject: str, reply_to: ReplyTo, message: Message) -> None:
        try:
            answer = Answer(self._pack(message), isinstance(message, ErrorReply))
        except MessageTooLarge as error:
            answer = Answer(self._pack(ErrorReply.of(error)), is_error=True)
        try:
            self._send(partial(self._network.answer, self.name, subject, reply_to, answer))
        except Overloaded as error:
            self._reception.counters.dropped += 1
            self._reception.log.report(("answer", subject), f"an answer of {subject} is lost: {error}")


class _Handle:
    """What `subscribe` and `serve` return."""

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close

    def close(self) -> None:
        """No handler call follows."""
        self._close()
