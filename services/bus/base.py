"""The typed bus: what services use to talk. `NatsBus` and `MemoryBus` pass one contract suite.

Delivery is at most once, in order from one publisher to one subscriber unless faults reorder. Nothing blocks:
`publish` queues or raises, `request` has a deadline, every queue a bound (`meshift.schemas.limits`).
"""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from meshift.schemas.base import Message

MessageT = TypeVar("MessageT", bound=Message)
ReplyT = TypeVar("ReplyT", bound=Message)

Handler = Callable[[MessageT], None]
"""Called on the event loop for each message; must not block. What it raises is counted and logged, not swallowed."""

EndpointHandler = Callable[[MessageT], Message | Awaitable[Message]]
"""Answers a request. A `MeshError` travels to the caller as itself, anything else as `InternalError`."""

Headers = Mapping[str, str]


class Propagator(Protocol):
    """Carries the trace context in message headers (W3C `traceparent`); `meshift.tracing.propagation` is one."""

    def inject(self) -> Headers:
        """Headers of the current context. Called where a message is published or a request made."""

    def attach(self, headers: Headers) -> AbstractContextManager[object]:
        """Makes the sender's context the current one. Held while the handler runs."""


@dataclass(frozen=True, slots=True)
class ServiceInfo:
    """How a service shows itself to `nats micro ls`."""

    name: str
    """`frontend`, `scheduler`, `worker`..."""
    instance: str
    description: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class BusCounters:
    """What an operator wants to know of a bus client."""

    published: int = 0
    received: int = 0
    dropped: int = 0
    """Messages lost to a full subscription queue, and answers that could not be sent."""
    invalid: int = 0
    """Messages that did not validate."""
    handler_errors: int = 0
    reconnects: int = 0


class Subscription(Protocol):
    """A running subscription."""

    def close(self) -> None:
        """No handler call follows. Idempotent."""


class Bus(Protocol):
    """One service's connection."""

    @property
    def counters(self) -> BusCounters:
        """Live counters."""

    async def start(self, service: ServiceInfo) -> None:
        """Connect (waiting for the server, up to the configured deadline: any start order works), register as a
        micro service. Subscriptions and endpoints may be made before or after. Raises `PeerTimeout`."""

    async def close(self) -> None:
        """Flush what was published, then leave. Idempotent."""

    async def flush(self, *, timeout_s: float) -> None:
        """Wait until all that was published, subscribed and served before is at the server. Raises `PeerTimeout`,
        `BusClosed`."""

    def publish(self, subject: str, message: Message) -> None:
        """Send to all subscribers, at most once. Raises `MessageTooLarge`, `Overloaded` (queue full),
        `BusClosed`. While disconnected, messages wait in the bounded queue."""

    async def request(self, subject: str, message: Message, reply_type: type[ReplyT], *, timeout_s: float) -> ReplyT:
        """Ask the endpoint. Raises `PeerGone` (nobody serves it: at once), `PeerTimeout`, `MessageTooLarge`
        (here, or of the answer, there), `Overloaded`, `BusClosed`, or the `MeshError` that the endpoint raised."""

    def subscribe(self, subject: str, message_type: type[MessageT], handler: Handler[MessageT]) -> Subscription:
        """Call `handler` for each message on `subject` (NATS wildcards allowed)."""

    def serve(
        self, name: str, subject: str, message_type: type[MessageT], handler: EndpointHandler[MessageT]
    ) -> Subscription:
        """Answer requests on `subject`, as the micro-service endpoint `name`. Endpoints of several services on
        one subject share the requests. Raises ValueError if this client serves the subject already."""
