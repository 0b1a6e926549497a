"""Staging memory: what is gathered waits here to be sent, what is received waits here to be scattered.

A `StagingPool` is one page-aligned arena of a fixed size, cut into buffers as they are asked for, so that
a transport that needs registered memory registers it once. The system gives it pages as they are first
written; the lowest free place is taken first, so that a little-used pool stays small. When it is full,
`try_acquire` says so and the caller comes again later: that is the back-pressure, and the bound of memory.
"""

import mmap
import threading
from bisect import bisect_left, insort
from types import TracebackType

import numpy as np

PAGE_BYTES = mmap.PAGESIZE


class StagingBuffer:
    """A part of the pool, until `release`. A context manager."""

    __slots__ = ("_pool", "offset", "view")

    def __init__(self, pool: "StagingPool", offset: int, view: memoryview) -> None:
        self._pool: StagingPool | None = pool
        self.offset = offset
        """Where it begins in the pool's arena."""
        self.view = view
        """As many bytes as were asked for, page-aligned; what they hold is left from before."""

    def release(self) -> None:
        """Give it back: nobody may read or write the view any more. Idempotent; any thread."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool._give_back(self.offset, self.view.nbytes)

    def __enter__(self) -> memoryview:
        return self.view

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class StagingPool:
    """Bounded memory for buffers of any size. Thread-safe; no call waits for memory."""

    def __init__(self, capacity_bytes: int) -> None:
        """`capacity_bytes` is rounded up to whole pages. Raises ValueError unless it is positive."""
        if capacity_bytes <= 0:
            raise ValueError(f"a staging pool of {capacity_bytes} bytes")
        self.capacity_bytes = _whole_pages(capacity_bytes)
        self._arena = mmap.mmap(-1, self.capacity_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory = memoryview(self._arena)
        self.address: int = np.frombuffer(self._memory, np.uint8).ctypes.data
        """Of the arena's first byte; the arena never moves."""
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = [(0, self.capacity_bytes)]
        """(offset, bytes), ascending, none empty, no two touching."""
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """In buffers that are out, in whole pages."""
        return self._used_bytes

    def try_acquire(self, size: int) -> StagingBuffer | None:
        """A buffer of `size` bytes, or None while there is no room for it.

        Raises ValueError for a size that the pool can never give."""
        if not 0 <= size <= self.capacity_bytes:
            raise ValueError(f"{size} bytes of staging; the pool has {self.capacity_bytes}")
        pages = _whole_pages(size)
        with self._lock:
            for index, (offset, room) in enumerate(self._free):
                if room >= pages:
                    self._free[index : index + 1] = [(offset + pages, room - pages)] if room > pages else []
                    self._used_bytes += pages
                    return StagingBuffer(self, offset, self._memory[offset : offset + size])
        return None

    def offset_of(self, payload: bytes | memoryview) -> int | None:
        """Where a payload lies in the arena; None if it lies elsewhere."""
        view = np.frombuffer(payload, np.uint8)
        offset = int(view.ctypes.data) - self.address
        return offset if view.size and 0 <= offset <= self.capacity_bytes - view.size else None

    def check_integrity(self) -> None:
        """Free and used pages fill the arena, and free ones are in order. For tests and debugging."""
        with self._lock:
            end = -1
            for offset, room in self._free:
                assert offset > end, self._free
                assert room > 0, self._free
                end = offset + room
            assert end <= self.capacity_bytes
            assert sum(room for _, room in self._free) + self._used_bytes == self.capacity_bytes

    def _give_back(self, offset: int, size: int) -> None:
        pages = _whole_pages(size)
        with self._lock:
            self._used_bytes -= pages
            index = bisect_left(self._free, (offset, pages))
            if index < len(self._free) and self._free[index][0] == offset + pages:
                pages += self._free.pop(index)[1]
            if index and sum(self._free[index - 1]) == offset:
                offset, before = self._free.pop(index - 1)
                pages += before
            insort(self._free, (offset, pages))


def _whole_pages(size: int) -> int:
    return max(-(-size // PAGE_BYTES), 1) * PAGE_BYTES
