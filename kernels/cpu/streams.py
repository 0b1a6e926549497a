"""Large payloads through sockets in C++: each call blocks its thread and no other, until all has gone or come."""

import ctypes
import os
import zlib

import numpy as np

from meshift.kernels.cpu.library import PaceStruct, load


class Pace:
    """When bytes may leave, of all senders that share it."""

    def __init__(self, bytes_per_s: float, burst_s: float) -> None:
        """`burst_s`: of unused time that may be made up for. Raises KernelUnavailable."""
        self._library = load()
        self.struct = PaceStruct(-(2**62), round(burst_s * 1e9), 1e9 / bytes_per_s)

    def reserve(self, size: int) -> float:
        """Book `size` bytes; in how many seconds they may leave."""
        return float(self._library.meshift_reserve(self.struct, size)) / 1e9


def send(fd: int, payload: memoryview, pace: Pace | None, chunk_bytes: int, stall_timeout_s: float) -> None:
    """Send all of it, `chunk_bytes` at a time where there is a pace. Raises OSError; TimeoutError where the peer takes
    nothing for so long."""
    failure = load().meshift_send(
        fd, _address(payload), payload.nbytes, pace.struct if pace else None, chunk_bytes, _ns(stall_timeout_s)
    )
    if failure:
        raise OSError(failure, os.strerror(failure))


def receive(fd: int, out: memoryview, checksum: int, stall_timeout_s: float) -> int:
    """Fill `out`; the CRC-32 of what came after bytes with this one. Raises as `send`, ConnectionError at the end of
    the stream."""
    counted, crc = ctypes.c_int64(0), ctypes.c_uint32(checksum)
    failure = load().meshift_receive(fd, _address(out), out.nbytes, _ns(stall_timeout_s), counted, crc)
    if failure < 0:
        raise ConnectionError("closed by the peer")
    if failure:
        raise OSError(failure, os.strerror(failure))
    return zlib.crc32(out[counted.value :], crc.value)


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
