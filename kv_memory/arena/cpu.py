"""Units in a process's own memory: one anonymous mapping, reserved without being paid for."""

import contextlib
import ctypes
import errno
import mmap
from typing import Any

import numpy as np
import torch

from meshift.kv_memory.arena.base import Arena, ArenaExhausted, Units, runs

_MAP_NORESERVE = 0x4000
_MADV_POPULATE_WRITE = 23
"""Linux 5.14; older kernels say EINVAL."""


class CpuArena(Arena):
    """The unit's size must be a multiple of the system's page."""

    def __init__(self, units: int, unit_bytes: int, *, populate: bool = False) -> None:
        """`populate`: a commit gets its memory at once, so that it fails there and not at the first write, which the
        kernel would punish by killing a process. Otherwise memory comes with the first write to a page of it."""
        super().__init__(units, unit_bytes)
        if unit_bytes % mmap.PAGESIZE:
            raise ValueError(f"a unit of {unit_bytes} bytes isn't whole pages of {mmap.PAGESIZE}")
        self._populate = populate
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        try:
            self._map: mmap.mmap | None = mmap.mmap(-1, units * unit_bytes, flags=flags)
        except OSError as error:
            raise ArenaExhausted(f"{units * unit_bytes} bytes of addresses can't be reserved: {error}") from error
        # Small pages: a huge one would keep memory of released units.
        with contextlib.suppress(OSError):
            self._map.madvise(mmap.MADV_NOHUGEPAGE)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    @property
    def base(self) -> int:
        return self._bytes.data_ptr()

    @property
    def bytes(self) -> torch.Tensor:
        """All units, [units * unit_bytes] of uint8. To write to units that aren't backed takes memory that no count
        knows."""
        return self._bytes

    def close(self) -> None:
        """Views keep the mapping; without them it goes now."""
        backed = np.flatnonzero(self._backed)
        if len(backed):
            self.release(backed)
        self._bytes = torch.empty(0, dtype=torch.uint8)
        if self._map is not None:
            with contextlib.suppress(BufferError):
                self._map.close()
            self._map = None

    def resident_bytes(self) -> int:
        """What the system really keeps in memory for all units, by its own count."""
        return resident_bytes(self.base, self.units * self.unit_bytes)

    def _commit(self, units: Units) -> None:
        if not self._populate:
            return
        done: list[tuple[int, int]] = []
        for first, count in runs(units):
            done.append((first, count))
            try:
                self._advise(_MADV_POPULATE_WRITE, first, count)
            except OSError as error:
                if error.errno == errno.EINVAL:
                    self._populate = False
                    return
                for released in done:
                    self._advise(mmap.MADV_DONTNEED, *released)
                raise ArenaExhausted(f"no memory for {len(units)} units of {self.unit_bytes} bytes: {error}") from error

    def _release(self, units: Units) -> None:
        for first, count in runs(units):
            self._advise(mmap.MADV_DONTNEED, first, count)

    def _advise(self, advice: int, first: int, count: int) -> None:
        assert self._map is not None
        self._map.madvise(advice, first * self.unit_bytes, count * self.unit_bytes)


def give_back(address: int, count: int) -> None:
    """Let the system have the whole pages among these bytes of private memory: they read as zeros afterwards, and come
    back with the first write. Raises OSError for addresses that aren't mapped."""
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + count) // mmap.PAGESIZE * mmap.PAGESIZE
    if end <= start:
        return
    libc: Any = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "madvise")


def resident_bytes(address: int, count: int) -> int:
    """How many of these bytes the system keeps in memory, by its own count; a page that is shared with neighbours
    counts as far as it is within. Raises OSError for addresses that aren't mapped."""
    if not count:
        return 0
    start, end = address // mmap.PAGESIZE * mmap.PAGESIZE, address + count
    flags = np.zeros(-(-(end - start) // mmap.PAGESIZE), np.uint8)
    libc: Any = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(end - start), ctypes.c_void_p(flags.ctypes.data)):
        raise OSError(ctypes.get_errno(), "mincore")
    here = flags & 1
    outside = int(here[0]) * (address - start) + int(here[-1]) * (start + len(flags) * mmap.PAGESIZE - end)
    return int(np.count_nonzero(here)) * mmap.PAGESIZE - outside
