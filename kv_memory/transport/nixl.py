"""The data plane over NIXL (UCX: NVLink, RDMA, shared memory, TCP): for nodes with GPUs.

    sender                                         receiver
    payload in registered staging memory
    PATCH (head, where the payload lies)  ----->   checks the token, takes a staging buffer
                                          <=====   reads the payload into it
                                          <-----   applies it; ANSWER

The receiver pulls, so it alone decides when its memory is written, and a sender whose deadline has passed
has nothing under way: what a late receiver reads then doesn't fit its checksum. NIXL tells nothing of a
frozen peer and little of a dead one, so everything has a deadline. A read that has not ended by its own
keeps its staging buffer until it has, since it may write there still.

A transfer has one patch on the way at a time. NIXL has no progress thread here: this end polls on its loop,
at once while there is something to do, every millisecond while a transfer is open or a send runs, and
seldom otherwise. All of a peer's staging memory can be read by those who have an address of it: use it
within a trusted network. Staging memory is on the host."""

import asyncio
import base64
import binascii
import hmac
import logging
import secrets
import struct
import uuid
import zlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from meshift.kv_memory.staging import StagingBuffer, StagingPool
from meshift.kv_memory.transport import frames
from meshift.kv_memory.transport.base import Address, Patch, PatchHandler, TransportError
from meshift.kv_memory.transport.frames import FrameError, PatchHead
from meshift.kv_memory.transport.incoming import OpenTransfer, OpenTransfers, ReceiveMemory, Refused, not_open
from meshift.kv_memory.transport.limits import MIB, Pacer, TransportLimits
from meshift.kv_memory.transport.nixl_agent import NixlAgent, Read

SCHEME = "nixl"

METADATA_BYTES_MAX = 1 << 16
PEERS_MAX = 1024
PATCHES_MAX = 256
"""That a receiving end works on at a time; more are refused."""
STREAMS_KEPT_MAX = 4096
PAUSE_MIN_S, PAUSE_MAX_S, PAUSE_IDLE_S = 0.0001, 0.001, 0.02
"""Between two polls: soon after something happened, later, and while nothing is expected."""

NIXL_LIMITS = TransportLimits(patch_bytes_max=64 * MIB, in_flight_bytes_max=128 * MIB, receive_bytes_max=128 * MIB)
"""Smaller than elsewhere: registered memory can't be swapped."""

_PATCH, _ANSWER = b"P", b"A"
_SOURCE = struct.Struct("!QH")
_ENDPOINT_KEY_DIGITS = 32

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Stream:
    """One transfer at its sending end."""

    order: asyncio.Lock = field(default_factory=asyncio.Lock)
    broken: str | None = None
    users: int = 0

    def check(self, transfer_id: str) -> None:
        if self.broken is not None:
            raise TransportError(f"transfer {transfer_id} is broken: {self.broken}")


@dataclass(slots=True)
class _Arrival:
    """A patch that a sender has announced."""

    head: PatchHead
    transfer_id: str
    source_address: int
    sender_metadata: bytes


class NixlTransport:
    """One rank's end. Threads as for every transport. Its addresses are some hundred characters long."""

    def __init__(
        self, rank: int = 0, *, staging: StagingPool | None = None, limits: TransportLimits = NIXL_LIMITS
    ) -> None:
        """Payloads that lie in `staging` are sent from there; others are copied into it first. A pool of
        `in_flight_bytes_max` bytes unless given."""
        self.rank = rank
        self._limits = limits
        self._staging = staging or StagingPool(limits.in_flight_bytes_max)
        self._copies = ReceiveMemory(self._staging)
        self._received = StagingPool(limits.receive_bytes_max)
        self._memory = ReceiveMemory(self._received)
        # The first half of all tokens of this end: who knows it gets answers, everybody else silence.
        self._endpoint_key = secrets.token_hex(_ENDPOINT_KEY_DIGITS // 2)
        self._transfers = OpenTransfers(lambda: self._endpoint_key + secrets.token_hex(_ENDPOINT_KEY_DIGITS // 2))
        self._pacer = Pacer(limits.bytes_per_s)
        self._agent: NixlAgent | None = None
        self._location = ""
        self._closed = False
        self._peers: OrderedDict[bytes, str] = OrderedDict()
        self._streams: OrderedDict[str, _Stream] = OrderedDict()
        self._unanswered: dict[int, asyncio.Future[None]] = {}
        self._arrivals: dict[asyncio.Task[None], _Arrival] = {}
        self._reads: dict[Read, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._active_at_s = 0.0

    @property
    def buffered_bytes(self) -> int:
        """Memory that payloads in arrival hold."""
        return self._received.used_bytes

    async def start(self) -> None:
        """Make the agent and register the staging memory. Raises TransportError."""
        if self._closed:
            raise TransportError("closed")
        if self._agent is None:
            self._agent = NixlAgent(f"meshift-{uuid.uuid4().hex}", [self._staging, self._received])
            self._location = base64.b64encode(self._agent.metadata).decode()
            self._hurry()

    async def close(self) -> None:
        """Stop; running sends fail, senders under way are told. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._transfers.clear()
        for arrival in list(self._arrivals.values()):
            self._answer(arrival, "closed")
        for task in self._arrivals:
            task.cancel()
        await asyncio.gather(*self._arrivals, return_exceptions=True)
        for answer in self._unanswered.values():
            _fail(answer, "closed")
        if self._timer is not None:
            self._timer.cancel()
        if self._agent is not None:
            # Answers leave with the next polls.
            for _ in range(10):
                self._poll(self._agent)
            for read in self._reads:
                read.release()
            self._agent.close()

    def open_transfer(self, transfer_id: str, handler: PatchHandler) -> Address:
        """Accept patches of this transfer. Raises TransportError if not running, ValueError if it is open."""
        self._running()
        transfer = self._transfers.open(transfer_id, handler)
        return Address(SCHEME, self._location, self.rank, transfer.token)

    def close_transfer(self, transfer_id: str) -> None:
        """Refuse what still comes. Idempotent."""
        self._transfers.close(transfer_id)

    async def send(self, address: Address, patch: Patch, *, timeout_s: float) -> None:
        """Returns when the receiver has applied the patch. Raises TransportError, and from then on for
        every patch of that transfer."""
        agent = self._running()
        if address.scheme != SCHEME:
            raise TransportError(f"a {SCHEME} transport can't send to {address.scheme}")
        stream = self._stream(address.token)
        stream.check(patch.transfer_id)
        async with self._breaking(stream, timeout_s):
            if timeout_s <= 0:
                raise TimeoutError
            async with asyncio.timeout(timeout_s), stream.order:
                stream.check(patch.transfer_id)
                await self._send(agent, address, patch)

    # ---- sending ----

    async def _send(self, agent: NixlAgent, address: Address, patch: Patch) -> None:
        size = memoryview(patch.payload).nbytes
        if size > self._limits.patch_bytes_max:
            raise TransportError(f"a patch is larger than {self._limits.patch_bytes_max} bytes")
        peer = self._peer(agent, _metadata(address.location))
        sequence = secrets.randbits(64)
        head = frames.pack_patch(patch, address.token, sequence)
        async with self._registered(patch.payload) as source_address:
            await self._pacer.take(size)
            # `close` may have come meanwhile.
            self._running()
            answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._unanswered[sequence] = answer
            try:
                agent.notify(peer, _PATCH + head + _SOURCE.pack(source_address, len(agent.metadata)) + agent.metadata)
                self._hurry()
                await answer
            finally:
                del self._unanswered[sequence]

    @asynccontextmanager
    async def _registered(self, payload: bytes | memoryview) -> AsyncIterator[int]:
        """Where the payload lies in registered memory."""
        offset = self._staging.offset_of(payload)
        if offset is not None or not memoryview(payload).nbytes:
            yield self._staging.address + (offset or 0)
            return
        buffer = await self._copies.acquire(memoryview(payload).nbytes)
        try:
            buffer.view[:] = memoryview(payload).cast("B")
            yield self._staging.address + buffer.offset
        finally:
            self._copies.release(buffer)

    @asynccontextmanager
    async def _breaking(self, stream: _Stream, timeout_s: float) -> AsyncIterator[None]:
        """Whatever ends a send early breaks its transfer."""
        stream.users += 1
        try:
            yield
        except TimeoutError:
            stream.broken = stream.broken or f"no answer within {timeout_s} s"
            raise TransportError(stream.broken) from None
        except BaseException as error:
            stream.broken = stream.broken or str(error) or type(error).__name__
            raise
        finally:
            stream.users -= 1

    def _stream(self, token: str) -> _Stream:
        stream = self._streams.setdefault(token, _Stream())
        self._streams.move_to_end(token)
        if len(self._streams) > STREAMS_KEPT_MAX:
            idle = next((token for token, stream in self._streams.items() if not stream.users), None)
            if idle is not None:
                del self._streams[idle]
        return stream

    def _peer(self, agent: NixlAgent, metadata: bytes) -> str:
        """The name of a peer, which is made known if it isn't; the one unused for longest is forgotten."""
        if metadata not in self._peers:
            if len(self._peers) >= PEERS_MAX:
                agent.remove_peer(self._peers.popitem(last=False)[1])
            self._peers[metadata] = agent.add_peer(metadata)
        self._peers.move_to_end(metadata)
        return self._peers[metadata]

    # ---- polling ----

    def _hurry(self) -> None:
        """Something is about to happen: poll soon."""
        loop = asyncio.get_running_loop()
        self._active_at_s = loop.time()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_later(0, self._tick)

    def _tick(self) -> None:
        if self._closed or self._agent is None:
            return
        loop = asyncio.get_running_loop()
        if self._poll(self._agent):
            self._active_at_s = loop.time()
        self._timer = loop.call_later(self._pause_s(loop.time() - self._active_at_s), self._tick)

    def _pause_s(self, quiet_s: float) -> float:
        if not (self._reads or self._unanswered or self._transfers.count):
            return PAUSE_IDLE_S
        return min(max(quiet_s / 4, PAUSE_MIN_S), PAUSE_MAX_S) if quiet_s > PAUSE_MIN_S else 0.0

    def _poll(self, agent: NixlAgent) -> bool:
        """Move everything on; whether anything happened."""
        try:
            messages = agent.messages()
        except TransportError as error:
            _log.warning("can't poll: %s", error)
            messages = []
        for message in messages:
            try:
                self._take_message(message)
            except (FrameError, struct.error) as error:
                _log.debug("message dropped: %s", error)
        return self._check_reads() or bool(messages)

    def _check_reads(self) -> bool:
        settled = []
        for read, future in self._reads.items():
            try:
                if read.settled():
                    settled.append(read)
                    if not future.done():
                        future.set_result(None)
            except TransportError as error:
                settled.append(read)
                _fail(future, str(error))
        for read in settled:
            del self._reads[read]
        return bool(settled)

    def _take_message(self, message: bytes) -> None:
        """Raises FrameError or struct.error."""
        kind, body = message[:1], memoryview(message)[1:]
        if kind == _ANSWER:
            self._take_answer(body)
        elif kind == _PATCH:
            self._take_patch(body)
        else:
            raise FrameError("neither a patch nor an answer")

    # ---- answers ----

    def _take_answer(self, body: memoryview) -> None:
        head = frames.unpack_answer_head(body[: frames.ANSWER_HEAD_BYTES])
        answer = self._unanswered.get(head.sequence)
        if answer is None or answer.done():
            return
        if head.applied:
            answer.set_result(None)
        else:
            reason = bytes(body[frames.ANSWER_HEAD_BYTES :][: head.reason_bytes])
            _fail(answer, reason.decode(errors="replace") or "refused")

    def _answer(self, arrival: _Arrival, refusal: str | None) -> None:
        assert self._agent is not None
        try:
            peer = self._peer(self._agent, arrival.sender_metadata)
            self._agent.notify(peer, _ANSWER + frames.pack_answer(arrival.head.sequence, refusal))
        except TransportError as error:
            _log.warning("an answer of transfer %s can't be sent: %s", arrival.transfer_id, error)

    # ---- receiving ----

    def _take_patch(self, body: memoryview) -> None:
        arrival = _unpack_arrival(body)
        key = arrival.head.token[:_ENDPOINT_KEY_DIGITS]
        if not hmac.compare_digest(key, self._endpoint_key):
            raise FrameError("a stranger")
        if len(self._arrivals) >= PATCHES_MAX:
            self._answer(arrival, f"{PATCHES_MAX} patches are under way")
            return
        task = asyncio.get_running_loop().create_task(self._receive(arrival))
        self._arrivals[task] = arrival
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._arrivals.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("receiving a patch failed", exc_info=error)

    async def _receive(self, arrival: _Arrival) -> None:
        refusal: str | None
        try:
            transfer = self._transfers.find(arrival.transfer_id, arrival.head.token)
            if transfer is None:
                raise Refused(not_open(arrival.transfer_id))
            refusal = await self._apply(arrival, transfer)
        except TimeoutError:
            refusal = "no progress in time"
        except (Refused, TransportError) as error:
            refusal = str(error)
        self._answer(arrival, refusal)
        self._hurry()

    async def _apply(self, arrival: _Arrival, transfer: OpenTransfer) -> str | None:
        """Why it is refused, or None. Raises Refused, TransportError or TimeoutError."""
        head = arrival.head
        if head.payload_bytes > self._limits.patch_bytes_max:
            raise Refused(f"a patch of {head.payload_bytes} bytes; {self._limits.patch_bytes_max} are allowed")
        async with asyncio.timeout(self._limits.stall_timeout_s):
            buffer = await self._memory.acquire(head.payload_bytes)
        await self._within(self._fetch(arrival, buffer), buffer)
        try:
            patch = Patch(
                transfer.transfer_id, head.watermark, head.generation, head.rectangle, buffer.view, head.checksum
            )
            return self._transfers.apply(transfer, patch, zlib.crc32(buffer.view))
        finally:
            self._memory.release(buffer)

    async def _within(self, fetching: Coroutine[Any, Any, None], buffer: StagingBuffer) -> None:
        """Fill the buffer, in time. On failure the buffer is released once nothing is written there any
        more: later, if need be."""
        task = asyncio.get_running_loop().create_task(fetching)
        try:
            await asyncio.wait_for(asyncio.shield(task), self._limits.stall_timeout_s)
        except BaseException:
            task.add_done_callback(lambda task: self._abandon(task, buffer))
            raise

    def _abandon(self, task: asyncio.Task[None], buffer: StagingBuffer) -> None:
        if not task.cancelled():
            task.exception()
        self._memory.release(buffer)

    async def _fetch(self, arrival: _Arrival, buffer: StagingBuffer) -> None:
        """Returns when the payload is in the buffer; ends in no way before the read has."""
        size = arrival.head.payload_bytes
        if not size:
            return
        agent = self._running()
        peer = self._peer(agent, arrival.sender_metadata)
        read = agent.read(peer, arrival.source_address, self._received.address + buffer.offset, size)
        self._reads[read] = asyncio.get_running_loop().create_future()
        self._hurry()
        await self._reads[read]

    def _running(self) -> NixlAgent:
        if self._closed:
            raise TransportError("closed")
        if self._agent is None:
            raise TransportError("not started")
        return self._agent


def _unpack_arrival(body: memoryview) -> _Arrival:
    raw_head, rest = body[: frames.PATCH_HEAD_BYTES], body[frames.PATCH_HEAD_BYTES :]
    head = frames.unpack_patch_head(raw_head)
    name, rest = rest[: head.transfer_id_bytes], rest[head.transfer_id_bytes :]
    transfer_id = frames.unpack_transfer_id(head, raw_head, name)
    source_address, metadata_bytes = _SOURCE.unpack(rest[: _SOURCE.size])
    metadata = bytes(rest[_SOURCE.size :])
    if len(metadata) != metadata_bytes:
        raise FrameError("a patch is cut short")
    return _Arrival(head, transfer_id, source_address, metadata)


def _metadata(location: str) -> bytes:
    try:
        metadata = base64.b64decode(location, validate=True)
    except (binascii.Error, ValueError):
        metadata = b""
    if not 0 < len(metadata) < METADATA_BYTES_MAX:
        raise TransportError("the address isn't one of NIXL's")
    return metadata


def _fail(answer: "asyncio.Future[None]", reason: str) -> None:
    if not answer.done():
        answer.set_exception(TransportError(reason))
        # Its waiter may have left.
        answer.exception()
