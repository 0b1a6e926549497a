"""The receiving end of `NixlTransport`: it reads what a sender has announced, applies it and answers.

A read that doesn't end in time keeps its staging buffer until it does, since it may write there still."""

import asyncio
import hmac
import logging
import secrets
import struct
import zlib
from dataclasses import dataclass

from meshift.kv_memory.staging import StagingBuffer, StagingPool
from meshift.kv_memory.transport import frames
from meshift.kv_memory.transport.base import Patch, TransportError
from meshift.kv_memory.transport.frames import FrameError, PatchHead
from meshift.kv_memory.transport.incoming import OpenTransfer, OpenTransfers, ReceiveMemory, Refused, not_open
from meshift.kv_memory.transport.limits import TransportLimits
from meshift.kv_memory.transport.nixl_link import NixlLink

PATCHES_MAX = 256
"""Worked on at a time; more are refused."""

KEY_DIGITS = 32
"""The first half of a token."""

_SOURCE = struct.Struct("!QH")

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Arrival:
    """A patch that a sender has announced."""

    head: PatchHead
    transfer_id: str
    source_address: int
    sender_metadata: bytes


def pack_announcement(head: bytes, source_address: int, sender_metadata: bytes) -> bytes:
    """`head` is `frames.pack_patch`'s; the payload lies at `source_address` of the sender."""
    return head + _SOURCE.pack(source_address, len(sender_metadata)) + sender_metadata


def unpack_announcement(body: memoryview) -> Arrival:
    """Raises FrameError."""
    raw_head, rest = body[: frames.PATCH_HEAD_BYTES], body[frames.PATCH_HEAD_BYTES :]
    head = frames.unpack_patch_head(raw_head)
    name, rest = rest[: head.transfer_id_bytes], rest[head.transfer_id_bytes :]
    transfer_id = frames.unpack_transfer_id(head, raw_head, name)
    if len(rest) < _SOURCE.size:
        raise FrameError("an announcement is cut short")
    source_address, metadata_bytes = _SOURCE.unpack(rest[: _SOURCE.size])
    metadata = bytes(rest[_SOURCE.size :])
    if len(metadata) != metadata_bytes:
        raise FrameError("an announcement is cut short")
    return Arrival(head, transfer_id, source_address, metadata)


class NixlReceiver:
    """Takes announcements, from `take` until `close`."""

    def __init__(self, link: NixlLink, limits: TransportLimits, answer_kind: bytes) -> None:
        # The first half of all tokens of this end: who knows it gets answers, everybody else silence.
        self._key = secrets.token_hex(KEY_DIGITS // 2)
        self.transfers = OpenTransfers(lambda: self._key + secrets.token_hex(KEY_DIGITS // 2))
        self.pool = StagingPool(limits.receive_bytes_max)
        self._memory = ReceiveMemory(self.pool)
        self._link = link
        self._limits = limits
        self._answer_kind = answer_kind
        self._arrivals: dict[asyncio.Task[None], Arrival] = {}

    @property
    def expecting(self) -> bool:
        """Whether patches may come."""
        return bool(self.transfers.count or self._arrivals)

    def take(self, body: memoryview) -> None:
        """An announcement has come. Raises FrameError, of a stranger too."""
        arrival = unpack_announcement(body)
        if not hmac.compare_digest(arrival.head.token[:KEY_DIGITS], self._key):
            raise FrameError("a stranger")
        if len(self._arrivals) >= PATCHES_MAX:
            self._answer(arrival, f"{PATCHES_MAX} patches are under way")
            return
        task = asyncio.get_running_loop().create_task(self._receive(arrival))
        self._arrivals[task] = arrival
        task.add_done_callback(self._forget)

    async def close(self) -> None:
        """No handler is called any more; senders under way are told."""
        self.transfers.clear()
        for arrival in self._arrivals.values():
            self._answer(arrival, "closed")
        for task in self._arrivals:
            task.cancel()
        await asyncio.gather(*self._arrivals, return_exceptions=True)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._arrivals.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("receiving a patch failed", exc_info=error)

    def _answer(self, arrival: Arrival, refusal: str | None) -> None:
        message = self._answer_kind + frames.pack_answer(arrival.head.sequence, refusal)
        try:
            self._link.notify(arrival.sender_metadata, message)
        except TransportError as error:
            _log.warning("an answer of transfer %s can't be sent: %s", arrival.transfer_id, error)

    async def _receive(self, arrival: Arrival) -> None:
        refusal: str | None
        try:
            transfer = self.transfers.find(arrival.transfer_id, arrival.head.token)
            if transfer is None:
                raise Refused(not_open(arrival.transfer_id))
            refusal = await self._take(arrival, transfer)
        except TimeoutError:
            refusal = "no progress in time"
        except (Refused, TransportError) as error:
            refusal = str(error)
        self._answer(arrival, refusal)

    async def _take(self, arrival: Arrival, transfer: OpenTransfer) -> str | None:
        """Why it is refused, or None. Raises Refused, TransportError or TimeoutError."""
        head = arrival.head
        if head.payload_bytes > self._limits.patch_bytes_max:
            raise Refused(f"a patch of {head.payload_bytes} bytes; {self._limits.patch_bytes_max} are allowed")
        async with asyncio.timeout(self._limits.stall_timeout_s):
            buffer = await self._memory.acquire(head.payload_bytes)
        await self._fill(arrival, buffer)
        try:
            patch = Patch(
                transfer.transfer_id, head.watermark, head.generation, head.rectangle, buffer.view, head.checksum
            )
            return self.transfers.apply(transfer, patch, zlib.crc32(buffer.view))
        finally:
            self._memory.release(buffer)

    async def _fill(self, arrival: Arrival, buffer: StagingBuffer) -> None:
        """Fetch the payload, in time; on failure the buffer is released once nothing is written there any
        more. Raises TransportError or TimeoutError."""
        reading = asyncio.get_running_loop().create_task(self._read(arrival, buffer))
        try:
            async with asyncio.timeout(self._limits.stall_timeout_s):
                await asyncio.shield(reading)
        except BaseException:
            reading.add_done_callback(lambda reading: self._give_up(reading, buffer))
            raise

    async def _read(self, arrival: Arrival, buffer: StagingBuffer) -> None:
        size = arrival.head.payload_bytes
        if size:
            address = self.pool.address + buffer.offset
            await self._link.read(arrival.sender_metadata, arrival.source_address, address, size)

    def _give_up(self, reading: asyncio.Task[None], buffer: StagingBuffer) -> None:
        if not reading.cancelled():
            reading.exception()
        self._memory.release(buffer)
