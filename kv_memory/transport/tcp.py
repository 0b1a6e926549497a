"""The data plane over TCP: the default where there is no better network.

Nothing is encrypted: the token keeps strangers out of a trusted network, and no more. `frames.py` is the
format, `tcp_receiver.py` and `tcp_sender.py` are the two ends, `limits.py` bounds everything."""

from meshift.kv_memory.transport.base import Address, Patch, TransportError
from meshift.kv_memory.transport.compiled import CompiledStreams
from meshift.kv_memory.transport.end import TransportEnd, host_and_port
from meshift.kv_memory.transport.incoming import OpenTransfers
from meshift.kv_memory.transport.limits import Pacer, TransportLimits
from meshift.kv_memory.transport.tcp_receiver import TcpReceiver
from meshift.kv_memory.transport.tcp_sender import PayloadWriter, TcpSender

SCHEME = "tcp"


class TcpTransport(TransportEnd):
    """One rank's end, at `host:port`. `open_transfer` and `close_transfer` may be called from any thread, everything
    else on the loop that ran `start`. Handlers run on that loop."""

    scheme = SCHEME

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
        super().__init__(rank, OpenTransfers())
        self._host, self._port = host, port
        self._advertised_host = advertised_host or host
        limits = limits or TransportLimits()
        pacer = Pacer(limits.bytes_per_s)
        self._compiled = CompiledStreams(pacer) if compiled else None
        self._receiver = TcpReceiver(self._transfers, limits, self._compiled)
        self._sender = TcpSender(limits, PayloadWriter(pacer, self._compiled, limits.stall_timeout_s))

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
        if not self._starts():
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

    async def send(self, address: Address, patch: Patch, *, timeout_s: float) -> None:
        """Returns when the receiver has applied the patch. Raises TransportError, and from then on for
        every patch of that transfer."""
        self._check_send(address)
        await self._sender.send(host_and_port(address.location), address.token, patch, timeout_s=timeout_s)
