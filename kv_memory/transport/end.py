"""What the ends of all transports over a network have alike."""

import asyncio
from typing import Any

from meshift.kv_memory.transport.base import Address, PatchHandler, TransportError
from meshift.kv_memory.transport.incoming import OpenTransfers


class TransportEnd:
    """Where one rank's end is reached, from its start to its close, and its open transfers."""

    scheme: str
    """Of its addresses."""

    def __init__(self, rank: int, transfers: OpenTransfers) -> None:
        self.rank = rank
        self._transfers = transfers
        self._location: str | None = None
        self._closed = False

    @property
    def location(self) -> str:
        """What its addresses say. Raises TransportError before the start."""
        if self._location is None:
            raise TransportError("not started")
        return self._location

    def open_transfer(self, transfer_id: str, handler: PatchHandler) -> Address:
        """Accept patches of this transfer. Raises TransportError if not running, ValueError if it is open."""
        self._check_running()
        transfer = self._transfers.open(transfer_id, handler)
        return Address(self.scheme, self.location, self.rank, transfer.token)

    def close_transfer(self, transfer_id: str) -> None:
        """Refuse what still comes, what is half received included. Idempotent."""
        self._transfers.close(transfer_id)

    def _starts(self) -> bool:
        """Whether a start has anything to do. Raises TransportError if closed."""
        if self._closed:
            raise TransportError("closed")
        return self._location is None

    def _check_running(self) -> None:
        if self._starts():
            raise TransportError("not started")

    def _check_send(self, address: Address) -> None:
        """Raises TransportError if not running, or for an address of another transport."""
        self._check_running()
        if address.scheme != self.scheme:
            raise TransportError(f"a {self.scheme} transport can't send to {address.scheme}")


def host_and_port(location: str) -> tuple[str, int]:
    """Of a location `host:port`. Raises TransportError for another one."""
    host, _, port = location.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise TransportError(f"{location!r} is not a host and a port")
    return host, int(port)


def retrieve(outcome: "asyncio.Future[Any]") -> None:
    """It has come while nobody waits for it any more, and isn't to be complained of."""
    if not outcome.cancelled():
        outcome.exception()
