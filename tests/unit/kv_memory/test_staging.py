"""The staging pool against a plain model, and its bounds."""

import random
import threading

import pytest

from meshift.kv_memory.staging import PAGE_BYTES, StagingBuffer, StagingPool


@pytest.mark.parametrize("seed", range(5))
def test_buffers_never_overlap_and_nothing_is_lost(seed: int) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    pool = StagingPool(40 * PAGE_BYTES)
    out: list[tuple[StagingBuffer, int]] = []
    for step in range(400):
        if out and rng.random() < 0.5:
            buffer, mark = out.pop(rng.randrange(len(out)))
            assert bytes(buffer.view) == bytes([mark]) * buffer.view.nbytes
            buffer.release()
        else:
            buffer_or_none = pool.try_acquire(rng.randrange(0, 9 * PAGE_BYTES))
            if buffer_or_none is not None:
                buffer_or_none.view[:] = bytes([step % 256]) * buffer_or_none.view.nbytes
                out.append((buffer_or_none, step % 256))
        pool.check_integrity()
    for buffer, _ in out:
        buffer.release()
    pool.check_integrity()
    assert pool.used_bytes == 0
    whole = pool.try_acquire(pool.capacity_bytes)
    assert whole is not None


def test_aligned_and_as_long_as_asked() -> None:
    pool = StagingPool(10 * PAGE_BYTES)
    for size in (0, 1, PAGE_BYTES, PAGE_BYTES + 1):
        buffer = pool.try_acquire(size)
        assert buffer is not None
        assert buffer.view.nbytes == size
        assert buffer.offset % PAGE_BYTES == 0
    assert pool.address % PAGE_BYTES == 0


def test_full_says_so_and_has_room_again_after_a_release() -> None:
    pool = StagingPool(2 * PAGE_BYTES)
    first = pool.try_acquire(PAGE_BYTES)
    second = pool.try_acquire(1)
    assert first is not None
    assert second is not None
    assert pool.try_acquire(1) is None
    first.release()
    first.release()
    assert pool.used_bytes == PAGE_BYTES
    assert pool.try_acquire(1) is not None


def test_what_never_fits_is_an_error() -> None:
    pool = StagingPool(PAGE_BYTES)
    for size in (-1, PAGE_BYTES + 1):
        with pytest.raises(ValueError, match="staging"):
            pool.try_acquire(size)
    with pytest.raises(ValueError, match="staging pool"):
        StagingPool(0)


def test_where_a_payload_lies() -> None:
    pool = StagingPool(4 * PAGE_BYTES)
    pool.try_acquire(PAGE_BYTES)
    buffer = pool.try_acquire(PAGE_BYTES)
    assert buffer is not None
    assert pool.offset_of(buffer.view[10:20]) == PAGE_BYTES + 10
    assert pool.offset_of(b"elsewhere") is None
    assert pool.offset_of(b"") is None


def test_a_with_block_releases() -> None:
    pool = StagingPool(PAGE_BYTES)
    buffer = pool.try_acquire(8)
    assert buffer is not None
    with buffer as view:
        view[:] = b"12345678"
    assert pool.used_bytes == 0


def test_threads_share_it() -> None:
    pool = StagingPool(8 * PAGE_BYTES)
    wrong: list[str] = []

    def use(mark: int) -> None:
        rng = random.Random(mark)
        for _ in range(300):
            buffer = pool.try_acquire(rng.randrange(1, 3 * PAGE_BYTES))
            if buffer is None:
                continue
            pattern = bytes([mark]) * buffer.view.nbytes
            buffer.view[:] = pattern
            if bytes(buffer.view) != pattern:
                wrong.append(f"thread {mark}")
            buffer.release()

    threads = [threading.Thread(target=use, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == []
    assert pool.used_bytes == 0
    pool.check_integrity()
