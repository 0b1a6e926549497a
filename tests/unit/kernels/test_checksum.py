"""The compiled CRC-32 is zlib's."""

import random
import zlib

import pytest

pytest.importorskip("torch")

from meshift.kernels.cpu import checksum


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 79, 80, 127, 128, 4095, 4096, 100_003, 1 << 20])
def test_as_zlib(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "SIZE_MIN", 0 if size else 1)
    chance = random.Random(size)
    data = bytearray(chance.randbytes(size))
    for value in (0, 1, 0xFFFFFFFF, chance.getrandbits(32)):
        assert checksum.crc32(data, value) == zlib.crc32(data, value)
    assert checksum.crc32(memoryview(bytes(data))[1:]) == zlib.crc32(data[1:])


def test_piece_by_piece() -> None:
    data, value = random.Random(3).randbytes(1 << 18), 0
    for start in range(0, len(data), 50_001):
        value = checksum.crc32(data[start : start + 50_001], value)
    assert value == zlib.crc32(data)


def test_one_changed_bit_is_noticed() -> None:
    data = bytearray(1 << 13)
    before = checksum.crc32(data)
    data[5000] ^= 4
    assert checksum.crc32(data) != before
