"""Large payloads on threads in compiled code, beside the transport's loop.

What the loop does in Python takes the interpreter's lock from the thread that computes, which then waits for the lock
and for a core: a hundred times a second at 60 MB/s, on both ends. Here a thread sends or receives megabytes in one call
without it, pacing included."""

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from meshift.kernels.cpu import streams
from meshift.kernels.cpu.library import load
from meshift.kv_memory.transport import sockets
from meshift.kv_memory.transport.end import retrieve
from meshift.kv_memory.transport.limits import Pacer

PAYLOAD_BYTES_MIN = 1 << 18
"""For less, the loop is as good."""

SLICE_BYTES = 1 << 22
"""What one call receives at most: afterwards it is asked whether the rest is still wanted."""

THREADS_MAX = 32
"""More payloads at a time go through the loop."""

ResultT = TypeVar("ResultT")


class CompiledStreams:
    """The threads of one transport. Used on its loop."""

    def __init__(self, pacer: Pacer) -> None:
        """Raises KernelUnavailable. `pacer` counts with these threads from now on."""
        load()
        self._pace: streams.Pace | None = None
        if pacer.bytes_per_s is not None:
            self._pace = streams.Pace(pacer.bytes_per_s, pacer.BURST_S)
            pacer.reserve_with(self._pace.reserve)
        self._chunk_bytes = pacer.chunk_bytes or sockets.PIECE_BYTES_MAX
        self._pool = ThreadPoolExecutor(THREADS_MAX, "meshift-stream")
        self._busy = 0

    def takes(self, size: int) -> bool:
        """Whether a payload of so many bytes is for them now."""
        return size >= PAYLOAD_BYTES_MIN and self._busy < THREADS_MAX

    async def send(self, sock: socket.socket, payload: memoryview, *, stall_timeout_s: float) -> None:
        """All of it, paced. Raises OSError or TimeoutError. Cancelled, it hangs up."""

        def work() -> None:
            streams.send(sock.fileno(), payload, self._pace, self._chunk_bytes, stall_timeout_s)

        await self._run(sock, work)

    async def receive(self, sock: socket.socket, out: memoryview, checksum: int, *, stall_timeout_s: float) -> int:
        """Fill `out`; the CRC-32 of what came after bytes with this one. Raises ConnectionError at the end of the
        stream, TimeoutError, OSError. Cancelled, it hangs up."""

        def work() -> int:
            return streams.receive(sock.fileno(), out, checksum, stall_timeout_s)

        return await self._run(sock, work)

    def close(self) -> None:
        """After the last call has ended."""
        self._pool.shutdown(wait=False)

    async def _run(self, sock: socket.socket, work: Callable[[], ResultT]) -> ResultT:
        self._busy += 1
        call = asyncio.get_running_loop().run_in_executor(self._pool, work)
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            # The thread uses the socket and the memory: both stay until it has ended, which hanging up makes soon.
            sockets.hang_up(sock)
            while not call.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([call])
            retrieve(call)
            raise
        finally:
            self._busy -= 1
