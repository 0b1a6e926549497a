"""The data plane in one process, in the time of the running loop: the fake that ships.

A `MemoryFabric` is the network; each rank has a `MemoryTransport` on it. Nothing here reads a clock or
sleeps: arrival times are timers of the running loop, so the same code runs on a real loop and in virtual
time. A patch is

    begun   when this sending end has sent what it had before (one patch at a time, whatever the destination)
    sent    begun + bytes / bandwidth of the link
    applied sent + latency of the link, but never before an earlier patch of the transfer
    known   applied + latency of the link back

What goes wrong is drawn from the given `random.Random` (`FaultRates`, per patch) or scripted (`partition`,
`heal`, `kill`). A patch that is lost takes with it what follows in its transfer, as in a broken byte
stream; its sender learns it at its deadline. A patch that is refused is answered at once. Either way the
transfer is over at the sending end."""

import asyncio
import math
import random
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from meshift.kv_memory.transport.base import Address, Patch, PatchHandler, TransportError

SCHEME = "memory"

STREAMS_KEPT_MAX = 4096
"""Transfers that a sending end remembers, to keep their order and know the broken ones; oldest use goes
first."""


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two locations."""

    bandwidth_bytes_per_s: float = math.inf
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FaultRates:
    """Probability of each fault, per patch."""

    lost: float = 0.0
    """The patch never arrives, nor does anything behind it in its transfer."""
    corrupted: float = 0.0
    """A byte of the payload is flipped on the way."""
    duplicated: float = 0.0
    """The patch is applied twice, the second time right behind the first."""
    acknowledgement_lost: float = 0.0
    """The patch is applied and its sender doesn't learn it."""


def payload_bytes(patch: Patch) -> float:
    """The size of a patch on the wire."""
    return memoryview(patch.payload).nbytes


class MemoryFabric:
    """The network that the transports of one process share. One event loop uses it.

    `faults` may be replaced at any time; `wire_bytes` tells the size of a patch on the wire, for
    simulations whose payload stands for a larger one."""

    def __init__(
        self,
        *,
        link: Link | None = None,
        faults: FaultRates | None = None,
        rng: random.Random | None = None,
        wire_bytes: Callable[[Patch], float] = payload_bytes,
    ) -> None:
        self.faults = faults or FaultRates()
        self.wire_bytes = wire_bytes
        self._rng = rng or random.Random(0)
        self._default_link = link or Link()
        self._links: dict[tuple[str, str], Link] = {}
        self._partitions: set[frozenset[str]] = set()
        self._ends: dict[tuple[str, int], MemoryTransport] = {}

    def set_link(self, source: str, destination: str, link: Link) -> None:
        """Patches from `source` to `destination` that are sent from now on take this link."""
        self._links[source, destination] = link

    def link(self, source: str, destination: str) -> Link:
        """The link of that direction."""
        return self._links.get((source, destination), self._default_link)

    def partition(self, one: str, other: str) -> None:
        """Nothing arrives between the two locations any more, what is on the way included."""
        self._partitions.add(frozenset((one, other)))

    def heal(self, one: str, other: str) -> None:
        """End their partition; transfers that lost a patch stay broken."""
        self._partitions.discard(frozenset((one, other)))

    def kill(self, location: str) -> None:
        """Every rank there dies: its sends fail, what it sent is dropped, what is sent to it is refused."""
        for (where, _), end in list(self._ends.items()):
            if where == location:
                end._stop("killed")

    # ---- what the transports ask ----

    def _attach(self, end: "MemoryTransport") -> None:
        if (end.location, end.rank) in self._ends:
            raise TransportError(f"{end.location} rank {end.rank} is in use")
        self._ends[end.location, end.rank] = end

    def _detach(self, end: "MemoryTransport") -> None:
        if self._ends.get((end.location, end.rank)) is end:
            del self._ends[end.location, end.rank]

    def _token(self) -> str:
        return f"{self._rng.getrandbits(128):032x}"

    def _cut_off(self, one: str, other: str) -> bool:
        return frozenset((one, other)) in self._partitions

    def _carry(self, flight: "_Flight") -> None:
        """Put a patch on the way; what happens to it is drawn now."""
        loop = asyncio.get_running_loop()
        sender, stream = flight.sender, flight.stream
        link = self.link(sender.location, flight.address.location)
        sender._busy_until_s = max(loop.time(), sender._busy_until_s) + (
            self.wire_bytes(flight.patch) / link.bandwidth_bytes_per_s
        )
        stream.last_arrival_s = max(sender._busy_until_s + link.latency_s, stream.last_arrival_s)
        for copy in self._spoil(flight):
            # Timers due at the same time have no order on a stock loop, so each takes the stream's next
            # patch.
            stream.on_the_way.append(copy)
            loop.call_at(stream.last_arrival_s, self._arrive, stream)

    def _spoil(self, flight: "_Flight") -> list["_Flight"]:
        rates = self.faults
        if rates == FaultRates():
            return [flight]
        lost, corrupted, duplicated, silent = (self._rng.random() for _ in range(4))
        flight.lost = lost < rates.lost
        flight.silent = silent < rates.acknowledgement_lost
        if corrupted < rates.corrupted:
            flight.patch = self._corrupt(flight.patch)
        return [flight] * (2 if duplicated < rates.duplicated else 1)

    def _corrupt(self, patch: Patch) -> Patch:
        if not patch.payload:
            return replace(patch, checksum=patch.checksum ^ 1)
        payload = bytearray(patch.payload)
        payload[self._rng.randrange(len(payload))] ^= 1 << self._rng.randrange(8)
        return replace(patch, payload=bytes(payload))

    def _arrive(self, stream: "_Stream") -> None:
        flight = stream.on_the_way.popleft()
        sender, address = flight.sender, flight.address
        if flight.lost or self._cut_off(sender.location, address.location):
            stream.stalled = True
        if stream.stalled or sender.closed:
            return
        if stream.refused is None:
            end = self._ends.get((address.location, address.rank))
            refusal = (
                f"nobody receives at {address.location} rank {address.rank}"
                if end is None
                else end._receive(address.token, flight.patch)
            )
            stream.refused = refusal
        loop = asyncio.get_running_loop()
        back = self.link(address.location, sender.location)
        loop.call_at(loop.time() + back.latency_s, self._answer, flight, stream.refused)

    def _answer(self, flight: "_Flight", refusal: str | None) -> None:
        cut_off = self._cut_off(flight.sender.location, flight.address.location)
        if flight.silent or cut_off or flight.answer.done():
            return
        if refusal is None:
            flight.answer.set_result(None)
        else:
            flight.answer.set_exception(TransportError(refusal))


@dataclass(slots=True)
class _Stream:
    """One transfer at its sending end."""

    on_the_way: "deque[_Flight]" = field(default_factory=deque)
    last_arrival_s: float = -math.inf
    stalled: bool = False
    """Something was lost: nothing arrives any more."""
    refused: str | None = None
    """Why the receiver refused a patch; it takes no other."""
    broken: str | None = None
    """Why the sender gave up."""


@dataclass(slots=True)
class _Flight:
    """One patch on its way."""

    sender: "MemoryTransport"
    address: Address
    patch: Patch
    stream: _Stream
    answer: "asyncio.Future[None]"
    lost: bool = False
    silent: bool = False


@dataclass(frozen=True, slots=True)
class _Incoming:
    """One open transfer at its receiving end."""

    token: str
    handler: PatchHandler


class MemoryTransport:
    """One rank's end of a `MemoryFabric`. Partitions and kills go by `location`."""

    def __init__(self, fabric: MemoryFabric, location: str, rank: int = 0) -> None:
        self.location = location
        self.rank = rank
        self.closed = False
        self._fabric = fabric
        self._started = False
        self._busy_until_s = -math.inf
        self._incoming: dict[str, _Incoming] = {}
        self._streams: OrderedDict[str, _Stream] = OrderedDict()
        self._running: dict[asyncio.Future[None], None] = {}

    async def start(self) -> None:
        """Begin to listen. Raises TransportError if closed, or if the location and rank are in use."""
        if self.closed:
            raise TransportError("closed")
        if not self._started:
            self._fabric._attach(self)
            self._started = True

    async def close(self) -> None:
        """Stop; running sends fail. Idempotent."""
        self._stop("closed")

    def open_transfer(self, transfer_id: str, handler: PatchHandler) -> Address:
        """Accept patches of this transfer. Raises TransportError if not running, ValueError if it is open."""
        self._check_running()
        if transfer_id in self._incoming:
            raise ValueError(f"transfer {transfer_id} is open already")
        token = self._fabric._token()
        self._incoming[transfer_id] = _Incoming(token, handler)
        return Address(SCHEME, self.location, self.rank, token)

    def close_transfer(self, transfer_id: str) -> None:
        """Refuse what still comes. Idempotent."""
        self._incoming.pop(transfer_id, None)

    async def send(self, address: Address, patch: Patch, *, timeout_s: float) -> None:
        """Returns when the receiver has applied the patch. Raises TransportError, and from then on for
        every patch of that transfer."""
        self._check_running()
        if address.scheme != SCHEME:
            raise TransportError(f"a {SCHEME} transport can't send to {address.scheme}")
        stream = self._stream(address.token)
        if stream.broken is not None:
            raise TransportError(f"transfer {patch.transfer_id} is broken: {stream.broken}")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[None] = loop.create_future()
        late = TransportError(f"no answer from {address.location} within {timeout_s} s")
        timer = loop.call_later(timeout_s, _fail, answer, late)
        self._running[answer] = None
        self._fabric._carry(_Flight(self, address, patch, stream, answer))
        try:
            await answer
        except BaseException as error:
            stream.broken = str(error) or type(error).__name__
            raise
        finally:
            timer.cancel()
            del self._running[answer]

    # ---- what the fabric asks ----

    def _receive(self, token: str, patch: Patch) -> str | None:
        """Apply a patch; why it was refused, or None."""
        incoming = self._incoming.get(patch.transfer_id)
        if incoming is None or incoming.token != token:
            return f"transfer {patch.transfer_id} is not open here"
        if zlib.crc32(patch.payload) != patch.checksum:
            return f"checksum of a patch of transfer {patch.transfer_id} is wrong"
        try:
            incoming.handler(patch)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def _stop(self, reason: str) -> None:
        self.closed = True
        self._incoming.clear()
        self._fabric._detach(self)
        for answer in self._running:
            _fail(answer, TransportError(reason))

    def _stream(self, token: str) -> _Stream:
        stream = self._streams.setdefault(token, _Stream())
        self._streams.move_to_end(token)
        if len(self._streams) > STREAMS_KEPT_MAX:
            self._streams.popitem(last=False)
        return stream

    def _check_running(self) -> None:
        if self.closed:
            raise TransportError("closed")
        if not self._started:
            raise TransportError("not started")


def _fail(answer: "asyncio.Future[None]", error: TransportError) -> None:
    if not answer.done():
        answer.set_exception(error)
