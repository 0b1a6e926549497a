"""The sending end of `NixlTransport`: it lays a payload into registered memory, announces it, and waits."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from meshift.kv_memory.staging import StagingPool
from meshift.kv_memory.transport import frames
from meshift.kv_memory.transport.base import Address, Patch, TransportError
from meshift.kv_memory.transport.incoming import ReceiveMemory
from meshift.kv_memory.transport.limits import Pacer, TransportLimits
from meshift.kv_memory.transport.nixl_link import NixlLink, fail, metadata_of
from meshift.kv_memory.transport.nixl_receiver import pack_announcement
from meshift.kv_memory.transport.outgoing import Outgoing, OutgoingTransfers, check

PING_S = 0.5
"""While a send waits for its answer: that a peer is dead is told only to those who speak to it."""


class NixlSender:
    """Sends, one patch of a transfer at a time."""

    def __init__(
        self, link: NixlLink, limits: TransportLimits, staging: StagingPool, patch_kind: bytes, ping: bytes
    ) -> None:
        self._link = link
        self._limits = limits
        self._staging = staging
        self._copies = ReceiveMemory(staging)
        self._pacer = Pacer(limits.bytes_per_s)
        self._patch_kind = patch_kind
        self._ping = ping
        self._transfers: OutgoingTransfers[Outgoing] = OutgoingTransfers()
        self._unanswered: dict[int, asyncio.Future[None]] = {}

    @property
    def expecting(self) -> bool:
        """Whether answers may come."""
        return bool(self._unanswered)

    async def send(self, address: Address, patch: Patch, *, timeout_s: float) -> None:
        """As `Transport.send`."""
        transfer = self._transfers.get(address.token, Outgoing)
        async with self._transfers.sending(transfer, patch.transfer_id, timeout_s), transfer.turns.turn():
            check(transfer, patch.transfer_id)
            await self._send(address, patch)

    def take_answer(self, body: memoryview) -> None:
        """An answer has come. Raises FrameError."""
        head = frames.unpack_answer_head(body[: frames.ANSWER_HEAD_BYTES])
        answer = self._unanswered.get(head.sequence)
        if answer is None or answer.done():
            return
        if head.applied:
            answer.set_result(None)
        else:
            reason = bytes(body[frames.ANSWER_HEAD_BYTES :][: head.reason_bytes])
            fail(answer, reason.decode(errors="replace") or "refused")

    def close(self) -> None:
        """What runs fails."""
        for transfer in self._transfers:
            transfer.break_("closed")
        for answer in self._unanswered.values():
            fail(answer, "closed")

    async def _send(self, address: Address, patch: Patch) -> None:
        size = memoryview(patch.payload).nbytes
        if size > self._limits.patch_bytes_max:
            raise TransportError(f"a patch is larger than {self._limits.patch_bytes_max} bytes")
        peer, sequence = metadata_of(address.location), secrets.randbits(64)
        head = frames.pack_patch(patch, address.token, sequence)
        async with self._registered(patch.payload) as source_address:
            await self._pacer.take(size)
            message = self._patch_kind + pack_announcement(head, source_address, self._link.metadata)
            answer = self._unanswered[sequence] = asyncio.get_running_loop().create_future()
            try:
                self._link.notify(peer, message)
                await self._answered(peer, answer)
            finally:
                del self._unanswered[sequence]

    async def _answered(self, peer: bytes, answer: "asyncio.Future[None]") -> None:
        while not answer.done():
            await asyncio.wait([answer], timeout=PING_S)
            if not answer.done():
                self._link.notify(peer, self._ping)
        answer.result()

    @asynccontextmanager
    async def _registered(self, payload: bytes | memoryview) -> AsyncIterator[int]:
        """Where the payload lies in registered memory."""
        size = memoryview(payload).nbytes
        offset = self._staging.offset_of(payload) if size else 0
        if offset is not None:
            yield self._staging.address + offset
            return
        buffer = await self._copies.acquire(size)
        try:
            buffer.view[:] = memoryview(payload).cast("B")
            yield self._staging.address + buffer.offset
        finally:
            self._copies.release(buffer)

    def retry_copies(self) -> None:
        """Others give back to a pool that is shared, and wake nobody."""
        self._copies.retry()
