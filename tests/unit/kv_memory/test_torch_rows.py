"""Rows in torch tensors, staged and posted: exact bytes, bounds, and memory that comes back."""

import queue
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from meshift.kv_memory.data_thread import DataThread  # noqa: E402
from meshift.kv_memory.hashing import kv_hash  # noqa: E402
from meshift.kv_memory.rectangle import Rectangle  # noqa: E402
from meshift.kv_memory.staged import post_staged, split_tokens, stage  # noqa: E402
from meshift.kv_memory.staging import PAGE_BYTES, StagingPool  # noqa: E402
from meshift.kv_memory.torch_rows import TorchRows, TorchRowsSink, TorchRowsSource  # noqa: E402
from meshift.kv_memory.transport.base import Patch, TransportError  # noqa: E402
from meshift.kv_memory.transport.tcp import TcpTransport  # noqa: E402

TIMEOUT_S = 10.0
SEED = 11
LAYERS, SLOTS, HEADS, HEAD_DIM = 4, 64, 6, 16
OWNED = Rectangle(2, 2 + LAYERS, 0, 0, 3, 3 + HEADS)

Tensor = Any


def make_rows(dtype: str = "bfloat16", seed: int | None = SEED) -> tuple[TorchRows, list[tuple[Tensor, Tensor]]]:
    """Random bits, or zeros without a seed."""
    kind = getattr(torch, dtype)
    size = torch.empty(0, dtype=kind).element_size()
    generator = torch.Generator().manual_seed(seed or 0)

    def tensor() -> Tensor:
        shape = (SLOTS, HEADS, HEAD_DIM * size)
        bits = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        return (bits if seed is not None else torch.zeros_like(bits)).view(kind)

    buffers = [(tensor(), tensor()) for _ in range(LAYERS)]
    return TorchRows(buffers, OWNED), buffers


def expected(buffers: list[tuple[Tensor, Tensor]], slots: Tensor, part: Rectangle) -> bytes:
    """Value by value."""
    pieces = []
    for layer in range(part.layer_start - 2, part.layer_end - 2):
        for slot in slots[part.token_start : part.token_end].tolist():
            for which in (0, 1):
                rows = buffers[layer][which][slot, part.head_start - 3 : part.head_end - 3]
                pieces.append(rows.contiguous().view(torch.uint8).numpy().tobytes())
    return b"".join(pieces)


def some_slots(count: int, seed: int = SEED) -> Tensor:
    return torch.randperm(SLOTS, generator=torch.Generator().manual_seed(seed))[:count]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("index_type", ["int32", "int64"])
def test_payload_is_layer_token_kv_head(dtype: str, index_type: str) -> None:
    rows, buffers = make_rows(dtype)
    slots = some_slots(20).to(getattr(torch, index_type))
    part = Rectangle(3, 5, 4, 17, 4, 8)
    out = bytearray(rows.byte_count(part))
    rows.gather(part, slots, memoryview(out))
    assert bytes(out) == expected(buffers, slots, part)


def test_a_read_only_payload_is_scattered_too() -> None:
    source, buffers = make_rows()
    sink, written = make_rows(seed=None)
    slots, part = some_slots(10), Rectangle(2, 6, 0, 10, 3, 9)
    sink.scatter(part, slots, expected(buffers, slots, part))
    assert expected(written, slots, part) == expected(buffers, slots, part)
    assert source.token_bytes * 10 == source.byte_count(part)


@pytest.mark.parametrize(
    "part",
    [
        Rectangle(1, 3, 0, 1, 3, 4),
        Rectangle(2, 7, 0, 1, 3, 4),
        Rectangle(2, 3, 0, 11, 3, 4),
        Rectangle(2, 3, 0, 1, 2, 4),
        Rectangle(2, 3, 0, 1, 3, 10),
    ],
)
def test_outside_of_what_the_rank_owns(part: Rectangle) -> None:
    rows, _ = make_rows()
    payload = memoryview(bytearray(rows.byte_count(part)))
    with pytest.raises(ValueError, match="is not within"):
        rows.gather(part, some_slots(10), payload)
    with pytest.raises(ValueError, match="is not within"):
        rows.scatter(part, some_slots(10), payload)


def test_another_size_is_refused_and_nothing_written() -> None:
    rows, buffers = make_rows()
    slots, part = some_slots(4), Rectangle(2, 3, 0, 4, 3, 5)
    before = expected(buffers, slots, part)
    with pytest.raises(ValueError, match="bytes are not"):
        rows.scatter(part, slots, bytes(rows.byte_count(part) - 1))
    assert expected(buffers, slots, part) == before


def test_a_slot_that_does_not_exist() -> None:
    rows, _ = make_rows()
    part = Rectangle(2, 3, 0, 1, 3, 5)
    payload = memoryview(bytearray(rows.byte_count(part)))
    for slot in (SLOTS, -1):
        with pytest.raises(IndexError):
            rows.scatter(part, torch.tensor([slot]), payload)
    with pytest.raises(IndexError):
        rows.gather(part, torch.tensor([SLOTS]), payload)


def test_nothing_is_nothing() -> None:
    rows, _ = make_rows()
    rows.gather(Rectangle(2, 2, 0, 5, 3, 5), some_slots(5), memoryview(b""))
    rows.scatter(Rectangle(2, 3, 5, 5, 3, 5), some_slots(5), b"")
    nothing = TorchRows([], Rectangle(2, 2, 0, 0, 0, HEADS))
    assert (nothing.row_bytes, nothing.token_bytes) == (0, 0)


def test_tensors_that_do_not_fit() -> None:
    _, buffers = make_rows()
    k, v = buffers[0]
    for wrong in (buffers[:2], [(k, v[:, :2])] * LAYERS, [(k, v.float())] * LAYERS, [(k[0], v[0])] * LAYERS):
        with pytest.raises(ValueError, match=r"layers of tensors|a tensor|differ"):
            TorchRows(wrong, OWNED)
    meta = torch.empty(SLOTS, HEADS, HEAD_DIM, device="meta")
    with pytest.raises(ValueError, match="meta"):
        TorchRows([(meta, meta)] * LAYERS, OWNED)


# ---- hashes ----


def test_equal_rows_have_one_hash_whatever_their_slots() -> None:
    rows, buffers = make_rows()
    other, _ = make_rows(seed=None)
    part = Rectangle(2, 6, 3, 30, 3, 9)
    source, sink = TorchRowsSource(rows, some_slots(40), 40), TorchRowsSink(other, some_slots(40, seed=5))
    assert kv_hash(source, part) != kv_hash(sink, part)
    sink.scatter(part, source.gather(part))
    assert kv_hash(source, part) == kv_hash(sink, part)
    assert kv_hash(source, part) != kv_hash(source, Rectangle(2, 6, 3, 29, 3, 9))
    slot = int(some_slots(40)[3])
    buffers[3][1].view(torch.int16)[slot, 5, 15] ^= 1
    assert kv_hash(source, part) != kv_hash(sink, part)


def test_hash_of_more_tokens_than_are_read_at_once() -> None:
    rows, _ = make_rows()
    slots = torch.arange(600) % SLOTS
    source = TorchRowsSource(rows, slots, 600)
    part = Rectangle(2, 3, 0, 600, 3, 4)
    assert len(kv_hash(source, part)) == 32
    assert kv_hash(source, part) == kv_hash(TorchRowsSource(rows, slots.clone(), 600), part)


# ---- staging ----


def test_parts_cover_a_rectangle_in_order_and_in_bounds() -> None:
    whole = Rectangle(2, 6, 5, 105, 3, 9)
    for size in (1, 100, 1000, 10**9):
        parts = split_tokens(whole, 100, size)
        assert [part.token_start for part in parts] == [5, *(part.token_end for part in parts[:-1])]
        assert parts[-1].token_end == 105
        assert all(part.tokens * 100 <= max(size, 100) for part in parts)
        assert {(part.layers, part.heads) for part in parts} == {(4, 6)}
    assert split_tokens(Rectangle(2, 6, 5, 5, 3, 9), 100) == []
    assert split_tokens(whole, 0) == [whole]


def test_staging_waits_for_room_and_gives_it_back_on_errors() -> None:
    rows, _ = make_rows()
    pool = StagingPool(2 * PAGE_BYTES)
    part = Rectangle(2, 6, 0, 4, 3, 9)
    named = {"transfer_id": "move", "watermark": 4, "generation": 0}
    first = stage(pool, rows, some_slots(4), part, **named)  # type: ignore[arg-type]
    assert first is not None
    assert stage(pool, rows, some_slots(4), part, **named) is None  # type: ignore[arg-type]
    first.buffer.release()
    with pytest.raises(IndexError):
        stage(pool, rows, torch.full((4,), SLOTS), part, **named)  # type: ignore[arg-type]
    assert pool.used_bytes == 0


@pytest.fixture
def ends() -> Iterator[tuple[DataThread, DataThread]]:
    with ExitStack() as stack:
        threads = DataThread(TcpTransport), DataThread(TcpTransport)
        for thread in threads:
            thread.start(timeout_s=TIMEOUT_S)
            stack.callback(thread.close, timeout_s=TIMEOUT_S)
        yield threads


def test_rows_go_over_a_wire_through_a_small_pool(ends: tuple[DataThread, DataThread]) -> None:
    out, into = ends
    rows, buffers = make_rows()
    sink, written = make_rows(seed=None)
    slots, others = some_slots(SLOTS), some_slots(SLOTS, seed=6)
    done: queue.SimpleQueue[TransportError | None] = queue.SimpleQueue()

    def handler(patch: Patch) -> None:
        sink.scatter(patch.rectangle, others, patch.payload)

    address = into.open_transfer("move", handler)
    pool = StagingPool(4 * PAGE_BYTES)
    whole = Rectangle(2, 6, 0, SLOTS, 3, 9)
    for part in split_tokens(whole, rows.token_bytes, 2 * PAGE_BYTES):
        while (staged := stage(pool, rows, slots, part, transfer_id="move", watermark=1, generation=0)) is None:
            assert done.get(timeout=TIMEOUT_S) is None
        post_staged(out, address, staged, TIMEOUT_S, done.put)
    while out.posts or not done.empty():
        assert done.get(timeout=TIMEOUT_S) is None
    assert expected(written, others, whole) == expected(buffers, slots, whole)
    assert pool.used_bytes == 0


def test_a_buffer_is_back_before_the_callback_and_when_posting_fails(ends: tuple[DataThread, DataThread]) -> None:
    out, into = ends
    rows, _ = make_rows()
    pool = StagingPool(8 * PAGE_BYTES)
    used: queue.SimpleQueue[int] = queue.SimpleQueue()

    def staged() -> Any:
        part = Rectangle(2, 6, 0, 4, 3, 9)
        return stage(pool, rows, some_slots(4), part, transfer_id="move", watermark=4, generation=0)

    address = into.open_transfer("move", lambda patch: None)
    post_staged(out, address, staged(), TIMEOUT_S, lambda error: used.put(pool.used_bytes))
    assert used.get(timeout=TIMEOUT_S) == 0
    out.close(timeout_s=TIMEOUT_S)
    with pytest.raises(TransportError):
        post_staged(out, address, staged(), TIMEOUT_S, lambda error: None)
    assert pool.used_bytes == 0
