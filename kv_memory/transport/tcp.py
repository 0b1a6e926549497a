"""The data plane over TCP: the default where there is no better network.

Nothing is encrypted: the token keeps strangers out of a trusted network, and no more. `frames.py` is the
format, `tcp_receiver.py` and `tcp_sender.py` are the two ends, `limits.py` bounds everything."""

from meshift.kv_memory.transport.base import Address, Patch, PatchHandler, TransportError
from meshift.kv_memory.transport.compiled import CompiledStreams
from meshift.kv_memory.transport.incoming import OpenTransfers
from meshift.kv_memory.transport.limits import Pacer, TransportLimits
from meshift.kv_memory.transport.tcp_receiver import TcpReceiver
from meshift.kv_memory.transport.tcp_sender import PayloadWriter, TcpSender

SCHEME = "tcp"


class TcpTransport:
    """One rank's end. `open_transfer` and `close_transfer` may be called from any thread, everything else
    on the loop that ran `start`. Handlers run on that loop."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        rank: int = 0,
        *,
        advertised_host: str | None = None,
        limits: TransportLimits | None = None,
        compiled: bool = False,
    ) -> None:
        """Listens on `host`, an IP address; `port` 0 lets the system choose. Others are told to connect to
        `advertised_host`, which is `host` unless given: needed where `host` is a wildcard. `compiled`: large payloads
        go through compiled code on threads of their own, which spares a thread that computes in this process.

        Raises ValueError for a wildcard without it, KernelUnavailable."""
        if advertised_host is None and host in ("", "0.0.0.0", "::"):
            raise ValueError(f"listening on {host!r} needs an advertised host")
        self.rank = rank
        self._host, self._port = host, port
        self._advertised_host = advertised_host or host
        self._transfers = OpenTransfers()
        limits = limits or TransportLimits()
        pacer = Pacer(limits.bytes_per_s)
        self._compiled = CompiledStreams(pacer) if compiled else None
        self._receiver = TcpReceiver(self._transfers, limits, self._compiled)
        self._sender = TcpSender(limits, PayloadWriter(pacer, self._compiled, limits.stall_timeout_s))
        self._location: str | None = None
        self._closed = False

    @property
    def location(self) -> str:
        """`host:port`. Raises TransportError before the start."""
        if self._location is None:
            raise TransportError("not started")
        return self._location

    @property
    def connection_count(self) -> int:
        """Open connections, in both directions."""
        return self._receiver.connection_count + self._sender.connection_count

    @property
    def buffered_bytes(self) -> int:
        """Memory that payloads in arrival hold; never more than `receive_bytes_max`."""
        return self._receiver.buffered_bytes

    async def start(self) -> None:
        """Begin to listen. Raises TransportError if closed, or if the port is in use."""
        if self._closed:
            raise TransportError("closed")
        if self._location is not None:
            return
        try:
            port = self._receiver.start(self._host, self._port)
        except OSError as error:
            raise TransportError(f"can't listen at {self._host}:{self._port}: {error}") from None
        self._location = f"{self._advertised_host}:{port}"

    async def close(self) -> None:
        """Stop; running sends fail. Idempotent."""
        self._closed = True
        self._transfers.clear()
        await self._sender.close()
        await self._receiver.close()
        if self._compiled is not None:
            self._compiled.close()

    def open_transfer(self, transfer_id: str, handler: PatchHandler) -> Address:
        """Accept patches of this transfer. Raises TransportError if not running, ValueError if it is open."""
        self._check_running()
        transfer = self._transfers.open(transfer_id, handler)
        return Address(SCHEME, self.location, self.rank, transfer.token)

    def close_transfer(self, transfer_id: str) -> None:
        """Refuse what still comes, what is half received included. Idempotent."""
        self._transfers.close(transfer_id)

    async def send(self, address: Address, patch: Patch, *, timeout_s: float) -> None:
        """Returns when the receiver has applied the patch. Raises TransportError, and from then on for
        every patch of that transfer."""
        self._check_running()
        if address.scheme != SCHEME:
            raise TransportError(f"a {SCHEME} transport can't send to {address.scheme}")
        await self._sender.send(_target(address.location), address.token, patch, timeout_s=timeout_s)

    def _check_running(self) -> None:
        if self._closed:
            raise TransportError("closed")
        if self._location is None:
            raise TransportError("not started")


def _target(location: str) -> tuple[str, int]:
    host, _, port = location.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise TransportError(f"{location!r} is not a host and a port")
    return host, int(port)
