"""What the worker tells a rank process."""

from typing import Any

import msgspec

from meshift.kv_memory.transport.base import DataTransport


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the worker tells a rank; lies in a file beside the sockets."""

    rank: int
    tensor_rank: int
    stage: int
    worker_pid: int
    server_arguments: dict[str, Any]
    commands_address: str
    """Rank 0 connects here and pulls."""
    reports_address: str
    """Every rank connects here and pushes."""
    data_host: str
    """The IP address at which this rank receives KV."""
    data_transport: DataTransport
    """What carries it."""
    data_bytes_per_s: float | None
    """What it sends of KV at most; None: no limit."""
    rendezvous_port: int
    """On loopback, of torch.distributed."""
