"""The data plane over NIXL (UCX: NVLink, RDMA, shared memory, TCP): for nodes with GPUs.

    sender                                         receiver
    payload in registered staging memory
    PATCH (head, where the payload lies)  ----->   checks the token, takes a staging buffer
                                          <=====   reads the payload into it
                                          <-----   applies it; ANSWER

The receiver pulls, so it alone decides when its memory is written, and a sender whose deadline has passed
has nothing under way: what a late receiver reads then doesn't fit its checksum. NIXL tells nothing of a
frozen peer and little of a dead one, so everything has a deadline.

A transfer has one patch on the way at a time. NIXL has no progress thread here: this end polls on its loop,
at once while there is something to do, every millisecond while a transfer is open or a send runs, and
seldom otherwise. All staging memory can be read by those who have an address of this end: use it within a
trusted network. Staging memory is on the host.

It passes the whole transport suite. Two differences: a message to a peer that has died may be lost without
an error, and its sender learns that half a second later or at its deadline; and a rate is kept patch by
patch, not within one."""

import logging

from meshift.kv_memory.staging import StagingPool
from meshift.kv_memory.transport.base import Address, Patch
from meshift.kv_memory.transport.end import TransportEnd
from meshift.kv_memory.transport.frames import FrameError
from meshift.kv_memory.transport.limits import MIB, TransportLimits
from meshift.kv_memory.transport.nixl_agent import NixlAgent
from meshift.kv_memory.transport.nixl_link import MakeAgent, NixlLink, location_of
from meshift.kv_memory.transport.nixl_receiver import NixlReceiver
from meshift.kv_memory.transport.nixl_sender import NixlSender

SCHEME = "nixl"

NIXL_LIMITS = TransportLimits(patch_bytes_max=64 * MIB, in_flight_bytes_max=128 * MIB, receive_bytes_max=128 * MIB)
"""Smaller than elsewhere: registered memory can't be swapped."""

_PATCH, _ANSWER, _PING = b"P", b"A", b"."

_log = logging.getLogger(__name__)


class NixlTransport(TransportEnd):
    """One rank's end. Threads as for every transport. Its addresses are some hundred characters long."""

    scheme = SCHEME

    def __init__(
        self,
        rank: int = 0,
        *,
        staging: StagingPool | None = None,
        limits: TransportLimits = NIXL_LIMITS,
        make_agent: MakeAgent = NixlAgent,
    ) -> None:
        """Payloads that lie in `staging` are sent from there; others are copied into it first. A pool of
        `in_flight_bytes_max` bytes unless given."""
        self._staging = staging or StagingPool(limits.in_flight_bytes_max)
        self._link = NixlLink(make_agent, on_message=self._take_message, expecting=self._expecting)
        self._sender = NixlSender(self._link, limits, self._staging, _PATCH, _PING)
        self._receiver = NixlReceiver(self._link, limits, _ANSWER)
        super().__init__(rank, self._receiver.transfers)

    @property
    def buffered_bytes(self) -> int:
        """Memory that payloads in arrival hold."""
        return self._receiver.pool.used_bytes

    async def start(self) -> None:
        """Make the agent and register the staging memory. Raises TransportError if NIXL isn't there."""
        if self._starts():
            self._link.start([self._staging, self._receiver.pool])
            self._location = location_of(self._link.metadata)

    async def close(self) -> None:
        """Stop; running sends fail, senders to this end are told. Idempotent."""
        if not self._closed:
            self._closed = True
            self._sender.close()
            await self._receiver.close()
            self._link.close()

    async def send(self, address: Address, patch: Patch, *, timeout_s: float) -> None:
        """Returns when the receiver has applied the patch. Raises TransportError, and from then on for
        every patch of that transfer."""
        self._check_send(address)
        await self._sender.send(address, patch, timeout_s=timeout_s)

    def _expecting(self) -> bool:
        # Asked at each poll, which is often enough for this too.
        self._sender.retry_copies()
        return self._sender.expecting or self._receiver.expecting

    def _take_message(self, message: bytes) -> None:
        kind, body = message[:1], memoryview(message)[1:]
        try:
            if kind == _ANSWER:
                self._sender.take_answer(body)
            elif kind == _PATCH:
                self._receiver.take(body)
            elif kind != _PING:
                raise FrameError("neither a patch nor an answer")
        except FrameError as error:
            _log.debug("message dropped: %s", error)
