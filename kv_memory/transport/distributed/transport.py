"""The data plane over torch.distributed; see `meshift.kv_memory.transport.distributed`."""

from meshift.kv_memory.transport.base import Address, Patch, TransportError
from meshift.kv_memory.transport.distributed.access import Access, HandshakeLimits
from meshift.kv_memory.transport.distributed.gate import Gate
from meshift.kv_memory.transport.distributed.library import Library, MakeLibrary
from meshift.kv_memory.transport.distributed.receiver import DistributedReceiver
from meshift.kv_memory.transport.distributed.sender import DistributedSender
from meshift.kv_memory.transport.end import TransportEnd
from meshift.kv_memory.transport.limits import TransportLimits

SCHEME = "distributed"


def make_gloo(host: str) -> Library:
    """torch.distributed with Gloo. Raises TransportError if it isn't there."""
    try:
        # torch takes seconds to import, and whoever uses another transport doesn't need it.
        from meshift.kv_memory.transport.distributed.gloo import GlooLibrary
    except ImportError as error:
        raise TransportError(f"torch.distributed isn't there: {error}") from None
    return GlooLibrary(host)


class DistributedTransport(TransportEnd):
    """One rank's end, at `host:port` of its control channel. Threads as for every transport; inference's operations of
    the library go through `gate`."""

    scheme = SCHEME

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        rank: int = 0,
        *,
        gate: Gate | None = None,
        limits: TransportLimits | None = None,
        handshake: HandshakeLimits | None = None,
        make_library: MakeLibrary = make_gloo,
    ) -> None:
        """Listens on `host`, an IP address at which others reach it; `port` 0 lets the system choose. One transport per
        `gate`.

        Raises ValueError for a wildcard."""
        if host in ("", "0.0.0.0", "::"):
            raise ValueError(f"others can't reach {host!r}")
        self.gate = gate or Gate()
        """That inference enters."""
        self._host, self._port = host, port
        limits, handshake = limits or TransportLimits(), handshake or HandshakeLimits()
        self._access = Access(self.gate, make_library)
        self._sender = DistributedSender(self._access, limits, handshake)
        self._receiver = DistributedReceiver(self._access, limits, handshake)
        super().__init__(rank, self._receiver.transfers)

    @property
    def buffered_bytes(self) -> int:
        """Memory that payloads in arrival hold."""
        return self._receiver.pool.used_bytes

    @property
    def held_off(self) -> int:
        """How often a receiver sent a piece of this end back because inference was in its gate."""
        return self._sender.held_off

    async def start(self) -> None:
        """Begin to listen. Raises TransportError if closed, without torch, or if the port is in use."""
        if not self._starts():
            return
        await self._access.start(self._host)
        try:
            port = await self._receiver.start(self._host, self._port)
        except OSError as error:
            raise TransportError(f"can't listen at {self._host}:{self._port}: {error}") from None
        self._location = f"{self._host}:{port}"

    async def close(self) -> None:
        """Stop; running sends fail. Waits for what is in the library, `crossing_timeout_s` at most. Idempotent."""
        if self._closed:
            return
        self._closed = True
        await self._sender.close()
        await self._receiver.close()
        await self._access.close()

    async def send(self, address: Address, patch: Patch, *, timeout_s: float) -> None:
        """Returns when the receiver has applied the patch. Raises TransportError, and from then on for every patch of
        that transfer."""
        self._check_send(address)
        if address.location == self._location:
            raise TransportError("a rank doesn't send to itself")
        await self._sender.send(self.location, address, patch, timeout_s=timeout_s)
