"""The data plane: bulk KV bytes from a rank to a rank, beside the ordered command log and never over the bus.

`MemoryTransport` (in process, virtual time, faults) is the fake; every transport passes
`tests/contract/transport_suite.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from meshift.kv_memory.rectangle import Rectangle

DataTransport = Literal["tcp", "nixl"]
"""Schemes that an engine's ranks can send KV by."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a rank receives. `token` is a secret of the handshake, good for one transfer."""

    scheme: str
    location: str
    rank: int = 0
    token: str = ""


@dataclass(frozen=True, slots=True)
class Patch:
    """One message of a transfer: the newest values of a rectangle."""

    transfer_id: str
    watermark: int
    """The writer's token count at the drain (`T_scheduled`); never falls within a generation of a transfer.
    Of a round that takes several patches, only the last carries it: the others repeat the round's before."""
    generation: int
    """Of the source's pages when gathered; a receiver refuses a patch of an older generation than it saw."""
    rectangle: Rectangle
    payload: bytes | memoryview
    """Bytes of the rectangle, layer-major, then token, then K before V, then head."""
    checksum: int
    """`zlib.crc32(payload)`."""


class TransportError(Exception):
    """The transfer broke: unreachable, refused, corrupted, or past its deadline. Safe to abort."""


PatchHandler = Callable[[Patch], None]


class Transport(Protocol):
    """One rank's end of the data plane. `open_transfer` and `close_transfer` may be called from any thread,
    everything else on the loop that ran `start`; handlers run on that loop."""

    async def start(self) -> None:
        """Begin to listen."""

    async def close(self) -> None:
        """Stop; running sends fail. Idempotent."""

    def open_transfer(self, transfer_id: str, handler: PatchHandler) -> Address:
        """Receiver: accept patches of this transfer at the returned address. `handler` must have applied the
        patch when it returns (its payload is the transport's afterwards) and bear the same patch twice in a
        row; what it raises reaches the sender as TransportError. Raises ValueError if the transfer is open
        already."""

    def close_transfer(self, transfer_id: str) -> None:
        """Receiver: refuse what still comes (writers are quiet afterwards). Idempotent."""

    async def send(self, address: Address, patch: Patch, *, timeout_s: float) -> None:
        """Sender: returns when the receiver has applied the patch. Patches of one transfer are applied in the
        order of the calls. Raises TransportError, and then for every later patch of that transfer: it is
        broken."""
