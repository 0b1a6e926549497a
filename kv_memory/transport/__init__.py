"""The data plane: `Transport` (base.py), and its implementations, one file each.

memory  MemoryTransport   in one process, on the running loop's time, with bandwidth, latency and faults
"""

from meshift.kv_memory.transport.base import Address, Patch, PatchHandler, Transport, TransportError
from meshift.kv_memory.transport.memory import FaultRates, Link, MemoryFabric, MemoryTransport

__all__ = [
    "Address",
    "FaultRates",
    "Link",
    "MemoryFabric",
    "MemoryTransport",
    "Patch",
    "PatchHandler",
    "Transport",
    "TransportError",
    "create_transport",
]


def create_transport(scheme: str, *, location: str, rank: int = 0, fabric: MemoryFabric | None = None) -> Transport:
    """A transport that isn't started yet. `fabric` is the network of the scheme `memory`.

    Raises ValueError for a scheme that doesn't exist, or without the fabric that it needs."""
    if scheme != "memory":
        raise ValueError(f"no transport {scheme!r}: known are memory")
    if fabric is None:
        raise ValueError("the memory transport needs a fabric")
    return MemoryTransport(fabric, location, rank)
