"""The data plane: `Transport` (base.py), and its implementations, one file each.

memory       MemoryTransport       in one process, on the running loop's time, with bandwidth, latency and faults
tcp          TcpTransport          between processes, over sockets: the default without a better network
nixl         NixlTransport         between processes, over NIXL: for nodes with GPUs
distributed  DistributedTransport  between processes, over torch.distributed, which inference uses too: the last resort
"""

from meshift.kv_memory.staging import StagingPool
from meshift.kv_memory.transport.base import Address, Patch, PatchHandler, Transport, TransportError
from meshift.kv_memory.transport.distributed import DistributedTransport, Gate
from meshift.kv_memory.transport.limits import TransportLimits
from meshift.kv_memory.transport.memory import FaultRates, Link, MemoryFabric, MemoryTransport
from meshift.kv_memory.transport.nixl import NIXL_LIMITS, NixlTransport
from meshift.kv_memory.transport.tcp import TcpTransport

__all__ = [
    "NIXL_LIMITS",
    "Address",
    "DistributedTransport",
    "FaultRates",
    "Gate",
    "Link",
    "MemoryFabric",
    "MemoryTransport",
    "NixlTransport",
    "Patch",
    "PatchHandler",
    "TcpTransport",
    "Transport",
    "TransportError",
    "TransportLimits",
    "create_transport",
]


def create_transport(
    scheme: str,
    *,
    location: str = "127.0.0.1",
    rank: int = 0,
    fabric: MemoryFabric | None = None,
    limits: TransportLimits | None = None,
    staging: StagingPool | None = None,
    gate: Gate | None = None,
    compiled: bool = False,
) -> Transport:
    """A transport that isn't started yet. For `memory`, `location` is a name and `fabric` the network; for
    `tcp`, `location` is the IP address to listen on, with `:port` if it matters, and `compiled` spares a thread that
    computes in this process (raises KernelUnavailable); for `nixl`, it means nothing,
    and payloads in `staging` are sent without a copy; for `distributed`, it is as for `tcp`, and inference's
    operations of torch.distributed go through `gate`.

    Raises ValueError for a scheme that doesn't exist, or without the fabric that it needs."""
    host, _, port = location.rpartition(":") if location.count(":") == 1 else (location, "", "0")
    if scheme == "tcp":
        return TcpTransport(host, int(port), rank, limits=limits, compiled=compiled)
    if scheme == "nixl":
        return NixlTransport(rank, staging=staging, limits=limits or NIXL_LIMITS)
    if scheme == "distributed":
        return DistributedTransport(host, int(port), rank, gate=gate, limits=limits)
    if scheme != "memory":
        raise ValueError(f"no transport {scheme!r}: known are distributed, memory, nixl, tcp")
    if fabric is None:
        raise ValueError("the memory transport needs a fabric")
    return MemoryTransport(fabric, location, rank)
