"""From an engine's KV rows to posted patches: what a step thread does for a round of a move.

    parts = split_tokens(rectangle, rows.token_bytes, patch_bytes_max)
    for part in parts:
        staged = stage(pool, rows, slots, part, transfer_id=..., watermark=..., generation=...)
        if staged is None: ...              # the pool is full: go on with this part at a later step
        post_staged(data_thread, address, staged, timeout_s, on_done)

A round whose parts don't fit the pool goes on at the next step; only its last patch carries its watermark."""

from dataclasses import dataclass
from typing import Protocol, TypeVar

from meshift.kv_memory.data_thread import CHECKSUM_LATER, DataThread, OnDone
from meshift.kv_memory.rectangle import Rectangle
from meshift.kv_memory.staging import StagingBuffer, StagingPool
from meshift.kv_memory.transport.base import Address, Patch, TransportError

PATCH_BYTES_MAX = 8 << 20
"""A good size: large enough that Python is rare, small enough that a gather is short and a checksum holds up
the data thread for some milliseconds only."""

SlotsT_contra = TypeVar("SlotsT_contra", contravariant=True)


class Rows(Protocol[SlotsT_contra]):
    """One rank's KV memory, such as `TorchRows`."""

    def byte_count(self, rectangle: Rectangle) -> int:
        """Of a rectangle's payload."""

    def gather(self, rectangle: Rectangle, slots: SlotsT_contra, out: memoryview) -> None:
        """Fill `out` with the values of a rectangle."""


@dataclass(frozen=True, slots=True)
class StagedPatch:
    """A patch whose payload lies in a staging buffer."""

    patch: Patch
    buffer: StagingBuffer


def split_tokens(rectangle: Rectangle, token_bytes: int, patch_bytes_max: int = PATCH_BYTES_MAX) -> list[Rectangle]:
    """Parts of a rectangle, along its tokens, in order, none empty and none larger than `patch_bytes_max`
    unless a single token is. `token_bytes`: of one token in the rectangle's layers and heads."""
    if rectangle.empty:
        return []
    step = max(patch_bytes_max // token_bytes, 1) if token_bytes else rectangle.tokens
    ends = [*range(rectangle.token_start + step, rectangle.token_end, step), rectangle.token_end]
    starts = [rectangle.token_start, *ends[:-1]]
    return [
        Rectangle(rectangle.layer_start, rectangle.layer_end, start, end, rectangle.head_start, rectangle.head_end)
        for start, end in zip(starts, ends, strict=True)
    ]


def stage(
    pool: StagingPool,
    rows: Rows[SlotsT_contra],
    slots: SlotsT_contra,
    rectangle: Rectangle,
    *,
    transfer_id: str,
    watermark: int,
    generation: int,
) -> StagedPatch | None:
    """Gather a rectangle into a staging buffer, or None while the pool has no room. Its checksum is left to
    the data thread. Raises ValueError if the pool never has room, and what `rows.gather` raises."""
    buffer = pool.try_acquire(rows.byte_count(rectangle))
    if buffer is None:
        return None
    try:
        rows.gather(rectangle, slots, buffer.view)
    except BaseException:
        buffer.release()
        raise
    patch = Patch(transfer_id, watermark, generation, rectangle, buffer.view, CHECKSUM_LATER)
    return StagedPatch(patch, buffer)


def post_staged(
    data_thread: DataThread, address: Address, staged: StagedPatch, timeout_s: float, on_done: OnDone
) -> None:
    """Post it; its buffer is back in the pool before `on_done` is called. Raises as `DataThread.post`, the
    buffer being back then too."""

    def done(error: TransportError | None) -> None:
        staged.buffer.release()
        on_done(error)

    try:
        data_thread.post(address, staged.patch, timeout_s, done)
    except BaseException:
        staged.buffer.release()
        raise
