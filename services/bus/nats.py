"""The bus over NATS, with nats-py. Services appear in `nats micro ls`; requests go to micro-service endpoints.

What leaves goes straight into the connection's buffer; when that can't take it, through one bounded queue that one
task drains, as does each change of interest. So `publish` and `subscribe` need not wait, and keep their order,
whatever the connection does. Errors travel as `ErrorReply` with the `Nats-Service-Error` headers.

A subscription whose wildcards cover an endpoint's subject makes the server believe that somebody serves it: requests
then run into their deadline where they would fail at once.
"""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple, TypeVar

from meshift.schemas.base import Message
from meshift.schemas.errors import (
    BusClosed,
    ErrorReply,
    InternalError,
    InvalidRequest,
    MeshError,
    PeerGone,
)
from meshift.services.bus.base import (
    BusCounters,
    EndpointHandler,
    Handler,
    Headers,
    Propagator,
    ServiceInfo,
    Subscription,
)
from meshift.services.bus.codec import encode
from meshift.services.bus.nats_answers import check_wire_size, encode_answer
from meshift.services.bus.nats_client import STATUS_HEADER, BusClient, Inlet, Receiver, parse_headers
from meshift.services.bus.nats_connection import NatsConnection
from meshift.services.bus.nats_library import ERROR_CODE_HEADER, NUID, errors
from meshift.services.bus.nats_library import Subscription as NatsSubscription
from meshift.services.bus.nats_micro import MicroService, Request
from meshift.services.bus.nats_outbox import Action, Outbox, Outgoing
from meshift.services.bus.nats_settings import NatsSettings
from meshift.services.bus.pending import PendingRequests
from meshift.services.bus.receiver import Answer, Endpoint, Reception, Subscriber, open_answer
from meshift.services.bus.subjects import check_pattern, check_subject
from meshift.services.bus.tasks import AnswerTasks, end_task

__all__ = ["NatsBus", "NatsSettings"]

MessageT = TypeVar("MessageT", bound=Message)
ReplyT = TypeVar("ReplyT", bound=Message)

NO_RESPONDERS = "503"
ATTACH_TOKEN = 0
"""Of a client's first message to itself; those of requests count from 1."""

YIELD_EVERY = 128
"""Messages sent in a row before the loop gets a turn: nats-py doesn't yield while its buffer takes them."""


class _Attachment(NamedTuple):
    client: BusClient
    subscription: NatsSubscription


class NatsBus:
    """One service's client; see `Bus` for what the methods promise."""

    def __init__(self, settings: NatsSettings, *, propagator: Propagator | None = None) -> None:
        limits = settings.limits
        self._settings = settings
        self._reception = Reception(settings.client_name, propagator)
        self._connection = NatsConnection(settings, self._reception, self._attach)
        self._outbox = Outbox(limits.publish_queue_max, limits.publish_queue_bytes_max)
        self._pending: PendingRequests[Answer] = PendingRequests(limits.requests_in_flight_max)
        self._inbox = f"_INBOX.{NUID().next().decode()}"
        self._subscribers: dict[Subscriber[Any], _Attachment | None] = {}
        self._endpoints: dict[str, Endpoint[Any]] = {}
        self._tasks = AnswerTasks()
        self._service: ServiceInfo | None = None
        self._micro: MicroService | None = None
        self._sender: asyncio.Task[None] | None = None
        self._echoed = asyncio.Event()
        self._closing = False
        self._closed = False
        self._left = asyncio.Event()

    @property
    def counters(self) -> BusCounters:
        """Live counters."""
        return self._reception.counters

    async def start(self, service: ServiceInfo) -> None:
        """Connect and register. Raises `PeerTimeout`; RuntimeError if started before."""
        self._check_open()
        if self._service is not None:
            raise RuntimeError(f"bus client {self._settings.client_name} was started already")
        self._service = service
        try:
            await self._connection.open()
        except BaseException:
            self._service = None
            raise
        if self._closed:
            await self._connection.close()
            self._check_open()
        self._sender = asyncio.get_running_loop().create_task(self._send_all())

    async def close(self) -> None:
        """Leave: endpoints first, then, when their handlers at work have ended and the queue is sent, the rest."""
        if self._closing:
            await self._left.wait()
            return
        self._closing = True
        try:
            if self._sender is not None:
                await self._finish_work()
        finally:
            self._closed = True
            for subscriber in self._subscribers:
                subscriber.closed = True
            self._pending.close()
            if self._sender is not None:
                await end_task(self._sender)
            await self._connection.close()
            self._left.set()

    async def flush(self, *, timeout_s: float) -> None:
        """A message to oneself: the server handles what a client sends in order."""
        self._check_open()
        token, future = self._pending.open("the NATS server", timeout_s)

        async def echo(client: BusClient) -> None:
            await client.publish(self._reply_subject(token))

        try:
            self._outbox.put_action(echo)
            await future
        finally:
            self._pending.discard(token)

    def publish(self, subject: str, message: Message) -> None:
        """Send to all subscribers."""
        self._check_open()
        payload, headers = self._encode(subject, message)
        self._dispatch(subject, payload, headers)
        self._reception.counters.published += 1

    async def request(self, subject: str, message: Message, reply_type: type[ReplyT], *, timeout_s: float) -> ReplyT:
        """Ask an endpoint."""
        self._check_open()
        payload, headers = self._encode(subject, message)
        token, future = self._pending.open(subject, timeout_s)
        try:
            self._dispatch(subject, payload, headers, self._reply_subject(token), token)
            answer = await future
        finally:
            self._pending.discard(token)
        return open_answer(reply_type, subject, answer)

    def subscribe(self, subject: str, message_type: type[MessageT], handler: Handler[MessageT]) -> Subscription:
        """Call `handler` for each message."""
        self._check_open()
        subscriber = Subscriber(self._reception, check_pattern(subject), message_type, handler)
        self._subscribers[subscriber] = None
        self._outbox.put_action(partial(self._attach_subscriber, subscriber))
        return _Handle(partial(self._unsubscribe, subscriber))

    def serve(
        self, name: str, subject: str, message_type: type[MessageT], handler: EndpointHandler[MessageT]
    ) -> Subscription:
        """Answer requests."""
        self._check_open()
        if subject in self._endpoints:
            raise ValueError(f"bus client {self._settings.client_name} serves {subject} already")
        concurrency_max = self._settings.limits.endpoint_concurrency_max
        endpoint = Endpoint(
            self._reception, name, check_subject(subject), message_type, handler, concurrency_max=concurrency_max
        )
        self._endpoints[subject] = endpoint
        self._outbox.put_action(partial(self._attach_endpoint, endpoint))
        return _Handle(partial(self._stop_serving, endpoint))

    def _check_open(self) -> None:
        if self._closed:
            raise BusClosed(f"bus client {self._settings.client_name} is closed")

    def _reply_subject(self, token: int) -> str:
        return f"{self._inbox}.{token}"

    def _encode(self, subject: str, message: Message) -> tuple[bytes, Headers | None]:
        check_subject(subject)
        payload, headers = encode(message), self._reception.inject()
        check_wire_size(payload, headers, self._connection.payload_bytes_max)
        return payload, headers

    def _dispatch(
        self, subject: str, payload: bytes, headers: Headers | None, reply: str = "", token: int | None = None
    ) -> None:
        """Into the connection's buffer, or the queue. Raises `Overloaded`."""
        client = self._connection.client
        if client is None or not self._outbox.empty or not client.publish_now(subject, payload, reply, headers):
            self._outbox.put(Outgoing(subject, payload, headers, reply, token))

    # Leaving

    async def _finish_work(self) -> None:
        for endpoint in list(self._endpoints.values()):
            self._stop_serving(endpoint)
        timeout_s = self._settings.limits.close_timeout_s
        await self._tasks.finish(timeout_s)
        if self._connection.connected or not self._outbox.empty:
            # The answer from the server proves that it has all: a socket closed while data waits in it for
            # reading is reset, and what was just written to it may be lost.
            try:
                await self.flush(timeout_s=timeout_s)
            except MeshError as error:
                self._reception.log.report("close", f"closed with messages unsent: {error}")

    # Interest: each change is asked for once in the queue, and everything again of a new client

    async def _attach(self, client: BusClient) -> None:
        assert self._service is not None, "set by start"
        await client.subscribe_to(f"{self._inbox}.*", self._on_answer)
        for subscriber in list(self._subscribers):
            await self._attach_subscriber(subscriber, client)
        self._micro = MicroService(client, self._service, self._inlet, self._on_request)
        await self._micro.start()
        for endpoint in list(self._endpoints.values()):
            await self._attach_endpoint(endpoint, client)
        # Not `client.flush`: its ping may overtake subscriptions that nats-py still buffers.
        self._echoed.clear()
        await client.publish(self._reply_subject(ATTACH_TOKEN))
        async with asyncio.timeout(self._settings.attempt_timeout_s):
            await self._echoed.wait()

    def _inlet(self, receiver: Receiver, subject: str) -> Inlet:
        def on_drop() -> None:
            self._reception.counters.dropped += 1
            self._reception.log.report(("dropped", subject), f"slow consumer: the queue of {subject} is full")

        return Inlet(receiver, self._settings.limits.subscription_queue_max, on_drop)

    async def _attach_subscriber(self, subscriber: Subscriber[Any], client: BusClient) -> None:
        if subscriber not in self._subscribers:
            return
        attachment = self._subscribers[subscriber]
        if attachment is not None and attachment.client is client:
            return

        def receive(subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
            subscriber.deliver(payload, parse_headers(headers) if headers else None)

        raw = await client.subscribe_to(subscriber.subject, self._inlet(receive, subscriber.subject).put)
        if subscriber in self._subscribers:
            self._subscribers[subscriber] = _Attachment(client, raw)
        else:
            await raw.unsubscribe()

    def _unsubscribe(self, subscriber: Subscriber[Any]) -> None:
        subscriber.closed = True
        attachment = self._subscribers.pop(subscriber, None)
        if attachment is not None:
            self._outbox.put_action(partial(_detach, attachment))

    async def _attach_endpoint(self, endpoint: Endpoint[Any], client: BusClient) -> None:
        assert self._micro is not None, "made when the client was attached"
        if self._endpoints.get(endpoint.subject) is endpoint:
            await self._micro.add(endpoint)

    def _stop_serving(self, endpoint: Endpoint[Any]) -> None:
        if self._endpoints.get(endpoint.subject) is endpoint:
            endpoint.closed = True
            del self._endpoints[endpoint.subject]
            self._outbox.put_action(partial(self._detach_endpoint, endpoint))

    async def _detach_endpoint(self, endpoint: Endpoint[Any], client: BusClient) -> None:
        assert self._micro is not None, "made when the client was attached"
        await self._micro.remove(endpoint)

    # Sending

    async def _send_all(self) -> None:
        sent = 0
        # The flag is needed besides cancellation, which nats-py swallows in places.
        while not self._closed:
            item = await self._outbox.head()
            client = await self._connection.ready()
            if await self._send(client, item):
                self._outbox.done()
            sent += 1
            if sent % YIELD_EVERY == 0:
                await asyncio.sleep(0)

    async def _send(self, client: BusClient, item: Outgoing | Action) -> bool:
        """Whether the item is settled; if not, it must wait for the connection."""
        try:
            if not isinstance(item, Outgoing):
                await item(client)
            elif item.token is None or item.token in self._pending:
                check_wire_size(item.payload, item.headers, client.max_payload)
                headers = dict(item.headers) if item.headers else None
                await client.publish(item.subject, item.payload, reply=item.reply, headers=headers)
        except (errors.OutboundBufferLimitError, errors.ConnectionClosedError, errors.ConnectionDrainingError):
            await asyncio.sleep(0)
            return False
        except Exception as error:
            self._give_up(item, error)
        return True

    def _give_up(self, item: Outgoing | Action, error: Exception) -> None:
        if isinstance(item, Outgoing) and item.token is not None:
            failure = error if isinstance(error, MeshError) else InternalError(f"NATS: {type(error).__name__}: {error}")
            self._pending.fail(item.token, failure)
        else:
            self._reception.counters.dropped += 1
            self._reception.log.report(("send", type(error)), "what was to be sent is lost", error)

    # Receiving

    def _on_answer(self, subject: bytes, reply: bytes, payload: bytes, raw_headers: bytes | None) -> None:
        name = subject.rpartition(b".")[2]
        token = int(name) if name.isdigit() else None
        if token is None:
            return
        if token == ATTACH_TOKEN:
            self._echoed.set()
            return
        headers = parse_headers(raw_headers) or {}
        if headers.get(STATUS_HEADER) == NO_RESPONDERS and not payload:
            self._pending.gone(token)
        else:
            self._pending.resolve(token, Answer(payload, ERROR_CODE_HEADER in headers))

    def _on_request(self, endpoint: Endpoint[Any], request: Request) -> None:
        if endpoint.closed:
            self._respond(endpoint, request, ErrorReply.of(PeerGone(f"{endpoint.subject} is served no more")))
            return
        answer = endpoint.begin(request.payload, parse_headers(request.headers))
        if isinstance(answer, Message):
            self._respond(endpoint, request, answer)
        else:
            self._tasks.spawn(self._respond_later(endpoint, request, answer))

    async def _respond_later(
        self, endpoint: Endpoint[Any], request: Request, answer: Coroutine[Any, Any, Message]
    ) -> None:
        try:
            message = await answer
        except asyncio.CancelledError:
            gone = PeerGone(f"{self._settings.client_name} left before it could answer")
            self._respond(endpoint, request, ErrorReply.of(gone))
            raise
        self._respond(endpoint, request, message)

    def _respond(self, endpoint: Endpoint[Any], request: Request, message: Message) -> None:
        try:
            if not request.reply:
                raise InvalidRequest("it was published, not requested")
            payload, headers = encode_answer(message, self._connection.payload_bytes_max)
            self._dispatch(request.reply, payload, headers)
        except MeshError as error:
            self._reception.counters.dropped += 1
            self._reception.log.report(
                ("answer", endpoint.subject), f"an answer of {endpoint.subject} is lost: {error}"
            )


async def _detach(attachment: _Attachment, client: BusClient) -> None:
    if attachment.client is client:
        await attachment.subscription.unsubscribe()


class _Handle:
    """What `subscribe` and `serve` return."""

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close

    def close(self) -> None:
        """No handler call follows."""
        self._close()
