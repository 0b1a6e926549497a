"""Attention and slot copies in Triton, over a table of page addresses: for GPUs; under `TRITON_INTERPRET=1` also on CPU
tensors, slowly, for tests.

The layout is that of `KvPlace`: page `slot // page_tokens` is found in an int64 table of addresses, and offsets and
strides are the same in every page. References: `kernels/attention.py`, `kernels/slots.py`."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from meshift.kernels.attention import AttentionBatch
from meshift.kernels.places import KvPlace

BLOCK_TOKENS = 32
"""Keys taken at once."""

BLOCK_QUERIES = 16
"""Query tokens of one program."""

ELEMENTS: dict[torch.dtype, Any] = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@triton.jit
def _attend(
    query,
    out,
    pages,
    starts,
    lengths,
    slots,
    rows,
    scale,
    page_tokens,
    key_offset,
    value_offset,
    token_stride,
    head_stride,
    query_stride,
    out_stride,
    slots_stride,
    group: tl.constexpr,
    dim: tl.constexpr,
    padded: tl.constexpr,
    query_tile: tl.constexpr,
    tile: tl.constexpr,
    element: tl.constexpr,
):
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - start
    length = tl.load(lengths + sequence)
    row = tl.load(rows + sequence)
    at = tl.program_id(2) * query_tile + tl.arange(0, query_tile)
    dims = tl.arange(0, padded)
    here = (at < count)[:, None] & (dims < dim)[None, :]
    places = (start + at)[:, None] * query_stride + head * dim + dims[None, :]
    queries = tl.load(query + places, mask=here, other=0.0).to(tl.float32) * scale
    last = length - count + at
    top = tl.full([query_tile], -1e30, tl.float32)
    total = tl.zeros([query_tile], tl.float32)
    sums = tl.zeros([query_tile, padded], tl.float32)
    end = tl.minimum(length, length - count + (tl.program_id(2) + 1) * query_tile)
    for first in range(0, end, tile):
        token = first + tl.arange(0, tile)
        inside = token < end
        slot = tl.load(slots + row * slots_stride + token, mask=inside, other=0).to(tl.int64)
        page = tl.load(pages + slot // page_tokens, mask=inside, other=0)
        base = page + (slot % page_tokens) * token_stride + (head // group) * head_stride
        there = inside[:, None] & (dims < dim)[None, :]
        keys = (base + key_offset).to(tl.pointer_type(element))
        key = tl.load(keys[:, None] + dims[None, :], mask=there, other=0.0).to(tl.float32)
        score = tl.sum(queries[:, None, :] * key[None, :, :], 2)
        score = tl.where(inside[None, :] & (token[None, :] <= last[:, None]), score, -1e30)
        now = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp(score - now[:, None])
        weight = tl.where(score > -1e29, weight, 0.0)
        kept = tl.exp(top - now)
        values = (base + value_offset).to(tl.pointer_type(element))
        value = tl.load(values[:, None] + dims[None, :], mask=there, other=0.0).to(tl.float32)
        sums = sums * kept[:, None] + tl.sum(weight[:, :, None] * value[None, :, :], 1)
        total = total * kept + tl.sum(weight, 1)
        top = now
    result = sums / tl.maximum(total, 1e-30)[:, None]
    places = (start + at)[:, None] * out_stride + head * dim + dims[None, :]
    tl.store(out + places, result.to(out.dtype.element_ty), mask=here)


def attend(
    query: torch.Tensor,
    place: KvPlace,
    batch: AttentionBatch,
    out: torch.Tensor,
    scale: float,
    query_longest: int | None = None,
) -> None:
    """As `kernels.cpu.attention.attend`, of the place's device; `batch`'s tensors must be there too. Head sizes that
    aren't a power of two are padded to one. `query_longest`: the most query tokens of a sequence; to find it here
    waits for the device."""
    tokens, query_heads, head_dim = query.shape
    if place.dtype not in ELEMENTS or query.dtype != place.dtype or head_dim != place.head_dim:
        raise ValueError(f"query {list(query.shape)} of {query.dtype} doesn't fit {place}")
    if not tokens:
        return
    most = query_longest or int((batch.query_starts[1:] - batch.query_starts[:-1]).max())
    queries = 1 if most == 1 else BLOCK_QUERIES
    _attend[(batch.sequences, query_heads, triton.cdiv(most, queries))](
        query,
        out,
        place.pages,
        batch.query_starts,
        batch.lengths,
        batch.slots,
        batch.rows,
        scale,
        place.page_tokens,
        place.key_offset,
        place.value_offset,
        place.token_stride,
        place.head_stride,
        query.stride(0),
        out.stride(0),
        batch.slots.stride(0),
        group=query_heads // place.heads,
        dim=head_dim,
        padded=triton.next_power_of_2(head_dim),
        query_tile=queries,
        tile=BLOCK_TOKENS,
        element=ELEMENTS[query.dtype],
    )


@triton.jit
def _copy(
    pages,
    slots,
    staging,
    page_tokens,
    offset,
    token_stride,
    head_stride,
    staging_stride,
    count,
    head_bytes: tl.constexpr,
    padded: tl.constexpr,
    tile: tl.constexpr,
    to_slots: tl.constexpr,
):
    token = tl.program_id(0) * tile + tl.arange(0, tile)
    head = tl.program_id(1)
    inside = token < count
    byte = tl.arange(0, padded)
    both = inside[:, None] & (byte < head_bytes)[None, :]
    slot = tl.load(slots + token, mask=inside, other=0).to(tl.int64)
    page = tl.load(pages + slot // page_tokens, mask=inside, other=0)
    base = page + offset + (slot % page_tokens) * token_stride + head * head_stride
    kept = base.to(tl.pointer_type(tl.uint8))[:, None] + byte[None, :]
    staged = staging + token[:, None].to(tl.int64) * staging_stride + head * head_bytes + byte[None, :]
    if to_slots:
        tl.store(kept, tl.load(staged, mask=both), mask=both)
    else:
        tl.store(staged, tl.load(kept, mask=both), mask=both)


def gather_places(places: Sequence[KvPlace], slots: torch.Tensor, out: torch.Tensor) -> None:
    """As `kernels.cpu.slots.gather_places`, on the places' device; slots aren't checked."""
    _copy_all(places, slots, out, to_slots=False)


def scatter_places(staging: torch.Tensor, slots: torch.Tensor, places: Sequence[KvPlace]) -> None:
    """As `kernels.cpu.slots.scatter_places`, on the places' device; slots aren't checked."""
    _copy_all(places, slots, staging, to_slots=True)


def _copy_all(places: Sequence[KvPlace], slots: torch.Tensor, staging: torch.Tensor, to_slots: bool) -> None:
    if not places or tuple(staging.shape[:3]) != (len(places), len(slots), 2) or not staging.is_contiguous():
        raise ValueError(f"staging {list(staging.shape)} for {len(places)} layers and {len(slots)} tokens")
    if not len(slots):
        return
    raw = staging.view(torch.uint8)
    for layer, place in enumerate(places):
        for which, offset in enumerate((place.key_offset, place.value_offset)):
            part = raw[layer, :, which]
            size = place.head_dim * staging.element_size()
            _copy[(triton.cdiv(len(slots), BLOCK_TOKENS), place.heads)](
                place.pages,
                slots,
                part,
                place.page_tokens,
                offset,
                place.token_stride,
                place.head_stride,
                part.stride(0),
                len(slots),
                head_bytes=size,
                padded=triton.next_power_of_2(size),
                tile=BLOCK_TOKENS,
                to_slots=to_slots,
            )
