"""The server and the wires of the in-process bus: who gets what, when, and what is lost.

Like a NATS server, it shares the requests on one subject among the endpoints there, shows requests to plain
subscriptions too, and forgets a client that has left. Nothing here knows what a message means.
"""

import random
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol, TypeVar

from meshift.schemas.base import Message
from meshift.services.bus.base import Headers
from meshift.services.bus.codec import SharedDecoder
from meshift.services.bus.delay_line import NANOSECONDS, DelayLine
from meshift.services.bus.faults import Faults
from meshift.services.bus.receiver import Answer
from meshift.services.bus.subjects import is_pattern, matches

ROUTES_MAX = 65_536
"""Subjects whose receivers are remembered; over it they are found anew."""

InletT = TypeVar("InletT")

Payload = bytes | Message
LinkDelay = Callable[[str, str], float]
"""`(sender, receiver) -> seconds` on top of the network's delay. Must not shrink for a link, or messages overtake."""


class Mode(StrEnum):
    """How messages travel."""

    DIRECT = "direct"
    """As the (frozen) objects they are: fast. Of the size, only packed tokens are checked."""
    VALIDATE = "validate"
    """Encoded by the sender, validated by each receiver, size checked: as on NATS."""


class Client(Protocol):
    """A bus client, as the network sees it."""

    @property
    def name(self) -> str: ...

    def on_answer(self, token: int, answer: Answer) -> None: ...

    def on_no_responders(self, token: int) -> None: ...

    def on_disconnect(self) -> None: ...

    def on_reconnect(self) -> None: ...

    def on_kill(self) -> None: ...


class ReplyTo(NamedTuple):
    """Whose request it is."""

    client: Client
    token: int


class SubscriptionInlet:
    """Where one subscription's messages arrive. At most `queue_max` are under way to it."""

    def __init__(
        self,
        client: Client,
        pattern: str,
        accept: Callable[[Payload, Headers | None], None],
        on_drop: Callable[[], None],
        queue_max: int,
    ) -> None:
        self.client = client
        self.pattern = pattern
        self.accept = accept
        self.on_drop = on_drop
        self.queue_max = queue_max
        self.queued = 0
        self.sequence = 0
        self.open = True


class EndpointInlet:
    """Where one endpoint's requests arrive. After its removal those under way still do, until it is `cut`."""

    def __init__(
        self, client: Client, subject: str, accept: Callable[[Payload, Headers | None, ReplyTo], None]
    ) -> None:
        self.client = client
        self.subject = subject
        self.accept = accept
        self.cut = False

    def arrive(self, payload: Payload, headers: Headers | None, reply_to: ReplyTo) -> None:
        """The delay is over."""
        if not self.cut:
            self.accept(payload, headers, reply_to)


class _Route(NamedTuple):
    subscriptions: tuple[SubscriptionInlet, ...]
    endpoints: tuple[EndpointInlet, ...]


class MemoryNetwork:
    """A bus that `MemoryBus` clients connect to.

    `rng` chooses among endpoints on one subject (and seeds the faults, if none are given). Messages take `delay_s`,
    plus what `link_delay_s` says; without faults they stay in order on each link.
    """

    def __init__(
        self,
        rng: random.Random,
        *,
        mode: Mode = Mode.VALIDATE,
        delay_s: float = 0.0,
        link_delay_s: LinkDelay | None = None,
        faults: Faults | None = None,
    ) -> None:
        self.mode = mode
        self.decoder = SharedDecoder()
        self.faults = faults if faults is not None else Faults(random.Random(rng.getrandbits(64)))
        self.line = DelayLine(round(delay_s * NANOSECONDS))
        self._rng = rng
        self._link_delay_s = link_delay_s
        self._sequence = 0
        self._clients: dict[str, Client] = {}
        self._exact: dict[str, list[SubscriptionInlet]] = {}
        self._wild: list[SubscriptionInlet] = []
        self._endpoints: dict[str, list[EndpointInlet]] = {}
        self._routes: dict[str, _Route] = {}

    def kill(self, name: str) -> None:
        """The client's process dies: from now on it sends and receives nothing. Its name may be taken again."""
        self._client(name).on_kill()

    def disconnect(self, name: str) -> None:
        """The client loses the server, and the server notices."""
        self._client(name).on_disconnect()

    def reconnect(self, name: str) -> None:
        """The client finds the server again."""
        self._client(name).on_reconnect()

    def join(self, client: Client) -> None:
        """Take part under a name of one's own. Raises ValueError if another client has it."""
        if self._clients.setdefault(client.name, client) is not client:
            raise ValueError(f"a bus client named {client.name!r} is there already")

    def leave(self, client: Client) -> None:
        """Give the name back. Idempotent."""
        if self._clients.get(client.name) is client:
            del self._clients[client.name]

    def add_subscription(self, inlet: SubscriptionInlet) -> None:
        """Deliver there from now on."""
        self._sequence += 1
        inlet.sequence = self._sequence
        if is_pattern(inlet.pattern):
            self._wild.append(inlet)
        else:
            self._exact.setdefault(inlet.pattern, []).append(inlet)
        self._forget_route(inlet.pattern)

    def remove_subscription(self, inlet: SubscriptionInlet) -> None:
        """Deliver nothing more there, not even what is under way."""
        inlet.open = False
        if is_pattern(inlet.pattern):
            self._wild.remove(inlet)
        else:
            _remove(self._exact, inlet.pattern, inlet)
        self._forget_route(inlet.pattern)

    def add_endpoint(self, inlet: EndpointInlet) -> None:
        """Send (a share of) the requests on its subject there from now on."""
        self._endpoints.setdefault(inlet.subject, []).append(inlet)
        self._forget_route(inlet.subject)

    def remove_endpoint(self, inlet: EndpointInlet) -> None:
        """Send no more requests there."""
        _remove(self._endpoints, inlet.subject, inlet)
        self._forget_route(inlet.subject)

    def publish(self, sender: str, subject: str, payload: Payload, headers: Headers | None) -> None:
        """Send to all subscriptions."""
        inlets = self._route(subject).subscriptions
        if not self.faults.active and self._link_delay_s is None:
            # One entry of the line for all: they come at the same time, one after another.
            receivers = []
            for inlet in inlets:
                if inlet.queued < inlet.queue_max:
                    inlet.queued += 1
                    receivers.append(inlet)
                else:
                    inlet.on_drop()
            if receivers:
                self.line.call(0, _arrive, receivers, payload, headers)
            return
        for inlet in inlets:
            for extra_ns in self._copies(sender, inlet.client.name, subject):
                if inlet.queued < inlet.queue_max:
                    inlet.queued += 1
                    self.line.call(extra_ns, _arrive, (inlet,), payload, headers)
                else:
                    inlet.on_drop()

    def request(self, subject: str, payload: Payload, headers: Headers | None, reply_to: ReplyTo) -> None:
        """Send to one of the endpoints, or tell the requester that there is none."""
        endpoints = self._route(subject).endpoints
        sender = reply_to.client.name
        self.publish(sender, subject, payload, headers)
        if not endpoints:
            self.line.call(0, reply_to.client.on_no_responders, reply_to.token)
            return
        inlet = endpoints[0] if len(endpoints) == 1 else self._rng.choice(endpoints)
        for extra_ns in self._copies(sender, inlet.client.name, subject):
            self.line.call(extra_ns, inlet.arrive, payload, headers, reply_to)

    def answer(self, sender: str, subject: str, reply_to: ReplyTo, answer: Answer) -> None:
        """Send an endpoint's answer to the requester."""
        for extra_ns in self._copies(sender, reply_to.client.name, subject):
            self.line.call(extra_ns, reply_to.client.on_answer, reply_to.token, answer)

    def _copies(self, sender: str, receiver: str, subject: str) -> tuple[int, ...]:
        copies = self.faults.copies(sender, receiver, subject) if self.faults.active else (0,)
        if self._link_delay_s is None:
            return copies
        link_ns = round(self._link_delay_s(sender, receiver) * NANOSECONDS)
        return tuple(extra_ns + link_ns for extra_ns in copies)

    def _client(self, name: str) -> Client:
        if name not in self._clients:
            raise ValueError(f"no bus client named {name!r} is there")
        return self._clients[name]

    def _route(self, subject: str) -> _Route:
        route = self._routes.get(subject)
        if route is None:
            if len(self._routes) >= ROUTES_MAX:
                self._routes.clear()
            route = self._routes[subject] = self._find_route(subject)
        return route

    def _find_route(self, subject: str) -> _Route:
        inlets = self._exact.get(subject, []) + [i for i in self._wild if matches(i.pattern, subject)]
        inlets.sort(key=lambda inlet: inlet.sequence)
        return _Route(tuple(inlets), tuple(self._endpoints.get(subject, ())))

    def _forget_route(self, pattern: str) -> None:
        if is_pattern(pattern):
            self._routes.clear()
        else:
            self._routes.pop(pattern, None)


def _arrive(inlets: Sequence[SubscriptionInlet], payload: Payload, headers: Headers | None) -> None:
    """The delay is over."""
    for inlet in inlets:
        inlet.queued -= 1
        if inlet.open:
            inlet.accept(payload, headers)


def _remove(table: dict[str, list[InletT]], subject: str, inlet: InletT) -> None:
    table[subject].remove(inlet)
    if not table[subject]:
        del table[subject]
