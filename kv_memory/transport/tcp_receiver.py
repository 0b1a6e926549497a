"""The receiving end of `TcpTransport`: connections, and the patches that come through them.

A connection is a stranger until its first patch names an open transfer and its token. Strangers are few,
cost a head's bytes of memory, and are dropped without an answer when they present nothing, or nothing right,
in time. A patch that is refused is answered, and is the last of its connection: nothing behind it is
applied, as in a broken byte stream."""

import asyncio
import logging
import socket
from collections import OrderedDict
from contextlib import suppress
from functools import partial

from meshift.kv_memory.checksum import crc32
from meshift.kv_memory.staging import StagingPool
from meshift.kv_memory.transport import frames, sockets
from meshift.kv_memory.transport.base import Patch
from meshift.kv_memory.transport.compiled import SLICE_BYTES, CompiledStreams
from meshift.kv_memory.transport.frames import FrameError, PatchHead
from meshift.kv_memory.transport.incoming import OpenTransfer, OpenTransfers, ReceiveMemory, Refused, not_open
from meshift.kv_memory.transport.limits import TransportLimits

LISTEN_BACKLOG = 128

ACCEPT_PAUSE_S = 0.1
"""After accepting failed, for want of file descriptors for instance."""

ANSWER_BUFFER_BYTES = 1 << 15
"""What the system keeps of answers that a sender doesn't read; then it is held up, and dropped."""

_log = logging.getLogger(__name__)


class TcpReceiver:
    """Listens, from `start` to `close`."""

    def __init__(
        self, transfers: OpenTransfers, limits: TransportLimits, compiled: CompiledStreams | None = None
    ) -> None:
        """`compiled` receives large payloads."""
        self._transfers = transfers
        self._limits = limits
        self._compiled = compiled
        self._pool = StagingPool(limits.receive_bytes_max)
        self._memory = ReceiveMemory(self._pool)
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._connections: dict[asyncio.Task[None], None] = {}
        self._strangers: OrderedDict[asyncio.Task[None], None] = OrderedDict()

    @property
    def connection_count(self) -> int:
        """Strangers included."""
        return len(self._connections)

    @property
    def buffered_bytes(self) -> int:
        """Memory that payloads in arrival hold."""
        return self._pool.used_bytes

    def start(self, host: str, port: int) -> int:
        """Listen; the port, which the system chooses if it is 0. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=LISTEN_BACKLOG)
        self._listener.setblocking(False)
        self._accepting = asyncio.get_running_loop().create_task(self._accept(self._listener))
        return int(self._listener.getsockname()[1])

    async def close(self) -> None:
        """Drop every connection; no handler is called any more."""
        tasks = [*self._connections, *([self._accepting] if self._accepting else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()

    # ---- connections ----

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:
                _log.warning("can't accept connections: %s", error)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            if len(self._connections) >= self._limits.connections_max:
                sock.close()
                continue
            task = loop.create_task(self._serve(sock))
            self._connections[task] = None
            self._strangers[task] = None
            task.add_done_callback(partial(self._forget, sock))
            if len(self._strangers) > self._limits.strangers_max:
                self._strangers.popitem(last=False)[0].cancel()

    def _forget(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        sock.close()
        self._connections.pop(task, None)
        self._strangers.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a connection of the data plane failed", exc_info=error)

    async def _serve(self, sock: socket.socket) -> None:
        try:
            sockets.tune(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, ANSWER_BUFFER_BYTES)
            await self._take_patches(sock)
        except (FrameError, OSError) as error:
            # TimeoutError and ConnectionError are OSErrors.
            _log.debug("connection dropped: %s", str(error) or type(error).__name__)

    async def _take_patches(self, sock: socket.socket) -> None:
        timeout_s = self._limits.stranger_timeout_s
        while True:
            head, transfer_id = await self._read_head(sock, timeout_s)
            transfer = self._transfers.find(transfer_id, head.token)
            if transfer is None and _this_task() in self._strangers:
                return
            self._strangers.pop(_this_task(), None)
            timeout_s = 4 * self._limits.idle_timeout_s
            try:
                if transfer is None:
                    raise Refused(not_open(transfer_id))
                refusal = await self._take(sock, head, transfer)
            except Refused as error:
                refusal = str(error)
            answer = frames.pack_answer(head.sequence, refusal)
            await sockets.send_small(sock, answer, stall_timeout_s=self._limits.stall_timeout_s)
            await sockets.let_others_run()
            if refusal is not None:
                await self._part(sock)
                return

    async def _read_head(self, sock: socket.socket, timeout_s: float) -> tuple[PatchHead, str]:
        raw = bytearray(frames.PATCH_HEAD_BYTES)
        await sockets.receive(sock, memoryview(raw), stall_timeout_s=timeout_s)
        head = frames.unpack_patch_head(raw)
        name = bytearray(head.transfer_id_bytes)
        await sockets.receive(sock, memoryview(name), stall_timeout_s=self._limits.stranger_timeout_s)
        return head, frames.unpack_transfer_id(head, raw, name)

    async def _part(self, sock: socket.socket) -> None:
        """Closing at once would reset the connection, and the answer might be lost."""
        with suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
        byte_count_max = self._limits.in_flight_bytes_max + self._limits.patch_bytes_max
        await sockets.discard(sock, byte_count_max, timeout_s=self._limits.stall_timeout_s)

    # ---- patches ----

    async def _take(self, sock: socket.socket, head: PatchHead, transfer: OpenTransfer) -> str | None:
        """Receive the payload and have it applied; why it is refused, or None. Raises Refused, OSError."""
        if head.payload_bytes > self._limits.patch_bytes_max:
            raise Refused(f"a patch of {head.payload_bytes} bytes; {self._limits.patch_bytes_max} are allowed")
        async with asyncio.timeout(self._limits.stall_timeout_s):
            buffer = await self._memory.acquire(head.payload_bytes)
        try:
            checksum = await self._receive(sock, buffer.view, transfer)
            patch = Patch(
                transfer.transfer_id, head.watermark, head.generation, head.rectangle, buffer.view, head.checksum
            )
            return self._transfers.apply(transfer, patch, checksum)
        finally:
            self._memory.release(buffer)

    async def _receive(self, sock: socket.socket, view: memoryview, transfer: OpenTransfer) -> int:
        """The checksum of what has arrived, computed piece by piece while it is in the cache."""
        checksum, stall_timeout_s = 0, self._limits.stall_timeout_s

        def progress(piece: memoryview) -> None:
            nonlocal checksum
            self._check_open(transfer)
            checksum = crc32(piece, checksum)

        if self._compiled is None or not self._compiled.takes(len(view)):
            await sockets.receive_payload(sock, view, progress, stall_timeout_s=stall_timeout_s)
            return checksum
        for start in range(0, len(view), SLICE_BYTES):
            piece = view[start : start + SLICE_BYTES]
            checksum = await self._compiled.receive(sock, piece, checksum, stall_timeout_s=stall_timeout_s)
            self._check_open(transfer)
        return checksum

    def _check_open(self, transfer: OpenTransfer) -> None:
        if not self._transfers.is_open(transfer):
            raise Refused(not_open(transfer.transfer_id))


def _this_task() -> "asyncio.Task[None]":
    task = asyncio.current_task()
    assert task is not None
    return task
