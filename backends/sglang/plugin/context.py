"""What the rank's main program gives to the scheduler that SGLang builds."""

from dataclasses import dataclass

import zmq

from meshift.backends.sglang import wire
from meshift.kv_memory.transport.base import DataTransport

REPORT_QUEUE_MAX = 1_000_000
"""Reports that wait for a worker that doesn't read, before the rank gives up."""


class Outbox:
    """A rank's way to its worker. Sending never waits."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, REPORT_QUEUE_MAX)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.connect(address)

    def send(self, report: wire.Report) -> None:
        """Queue a report. Raises zmq.Again when the queue is full: the worker is gone or stuck for good."""
        self._socket.send(wire.encode(report), zmq.NOBLOCK)

    def close(self) -> None:
        """Wait a second at most for what is queued."""
        self._socket.close()


@dataclass(frozen=True, slots=True)
class RankContext:
    """This process's place in the instance."""

    rank: int
    outbox: Outbox
    reports_address: str
    data_host: str
    """The address, of this host, at which others' KV arrives."""
    data_transport: DataTransport = "tcp"
    data_bytes_per_s: float | None = None
    """What is sent of KV at most; None: no limit."""

    @property
    def leads(self) -> bool:
        """Whether this rank reports steps and load: the first stage's first tensor rank."""
        return self.rank == 0


_context: RankContext | None = None


def install(context: RankContext) -> None:
    """Called once, before SGLang builds its scheduler."""
    global _context
    _context = context


def current() -> RankContext:
    """The installed context."""
    if _context is None:
        raise RuntimeError("MESHIFT_ENGINE is set in a process that isn't a rank of a meshift worker: unset it")
    return _context
