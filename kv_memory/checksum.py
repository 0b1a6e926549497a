"""The checksum of payloads: CRC-32. zlib's, until a process that has a faster one says so; both give the same."""

import zlib
from collections.abc import Callable

Raw = bytes | bytearray | memoryview

_crc32: Callable[[Raw, int], int] = zlib.crc32


def crc32(data: Raw, value: int = 0) -> int:
    """Of `data`, after data whose checksum is `value`."""
    return _crc32(data, value)


def use(function: Callable[[Raw, int], int]) -> None:
    """Compute it so from now on, in this process."""
    global _crc32
    _crc32 = function
