"""Attention and slot copies in Triton, over a table of page addresses: for GPUs; under `TRITON_INTERPRET=1` also on CPU
tensors, slowly, for tests.

The layout is that of `KvPlace`: page `slot // page_tokens` is found in an int64 table of addresses, and offsets and
strides are the same in every page. References: `kernels/attention.py`, `kernels/slots.py`."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import os
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from meshift.kernels.attention import AttentionBatch
from meshift.kernels.places import KvPlace

BLOCK_TOKENS = 64
"""Keys taken at once."""

ALIGNMENT = 16
"""Bytes of the widest load. torch's allocations and an arena's units begin at multiples of far more."""

COPY_TOKENS = 32
"""Tokens that one program copies."""

BLOCK_ROWS = 64
"""Of a prefill's program: query tokens times the query heads of one KV head."""

DOT_ROWS_MIN = 16
"""The least that the GPU's matrix units take."""

PART_TOKENS = 512
"""Of a long sequence, for one program at a time in a step that only decodes."""

ELEMENTS: dict[torch.dtype, Any] = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


# Triton's interpreter has no products of 16-bit floats.
_WIDENS = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def _attend(
    query,
    out,
    part_sums,
    part_tops,
    part_totals,
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
    parts,
    group: tl.constexpr,
    dim: tl.constexpr,
    padded: tl.constexpr,
    row_count: tl.constexpr,
    query_tile: tl.constexpr,
    tile: tl.constexpr,
    part_tokens: tl.constexpr,
    split: tl.constexpr,
    element: tl.constexpr,
    factor: tl.constexpr,
    alignment: tl.constexpr,
):
    """One KV head of one sequence: some of its query tokens; or, `split`, its only one over a part of the keys."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - start
    length = tl.load(lengths + sequence)
    table = slots + tl.load(rows + sequence) * slots_stride
    if split:
        first_query = 0
        begin = tl.program_id(2) * part_tokens
        end = tl.minimum(length, begin + part_tokens)
    else:
        first_query = tl.program_id(2) * query_tile
        begin = 0
        end = tl.minimum(length, length - count + first_query + query_tile)
    row = tl.arange(0, row_count)
    at = first_query + row // group
    dims = tl.arange(0, padded)
    asked = (row // group < query_tile) & (at < count)
    here = asked[:, None] & (dims < dim)[None, :]
    query_head = head * group + row % group
    places = (start + at)[:, None] * query_stride + (query_head * dim)[:, None] + dims[None, :]
    queries = tl.load(query + places, mask=here, other=0.0).to(factor)
    last = length - count + at
    top = tl.full([row_count], -1e30, tl.float32)
    total = tl.zeros([row_count], tl.float32)
    sums = tl.zeros([row_count, padded], tl.float32)
    for first in range(begin, end, tile):
        token = first + tl.arange(0, tile)
        inside = token < end
        slot = tl.load(table + token, mask=inside, other=0).to(tl.int64)
        page = tl.load(pages + slot // page_tokens, mask=inside, other=0)
        base = page + (slot % page_tokens) * token_stride + head * head_stride
        # Without this promise each element would be loaded by itself.
        keys = tl.multiple_of((base + key_offset).to(tl.pointer_type(element)), alignment)
        within = (dims < dim)[:, None] & inside[None, :]
        key = tl.load(keys[None, :] + dims[:, None], mask=within, other=0.0).to(factor)
        score = tl.dot(queries, key, input_precision="ieee") * scale
        score = tl.where(inside[None, :] & (token[None, :] <= last[:, None]), score, -1e30)
        now = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp(score - now[:, None])
        weight = tl.where(score > -1e29, weight, 0.0)
        kept = tl.exp(top - now)
        values = tl.multiple_of((base + value_offset).to(tl.pointer_type(element)), alignment)
        there = inside[:, None] & (dims < dim)[None, :]
        value = tl.load(values[:, None] + dims[None, :], mask=there, other=0.0).to(factor)
        sums = sums * kept[:, None] + tl.dot(weight.to(factor), value, input_precision="ieee")
        total = total * kept + tl.sum(weight, 1)
        top = now
    if split:
        part = ((sequence * tl.num_programs(1) + head) * parts + tl.program_id(2)) * row_count + row
        tl.store(part_tops + part, top)
        tl.store(part_totals + part, total)
        tl.store(part_sums + (part * padded)[:, None] + dims[None, :], sums)
    else:
        result = sums / tl.maximum(total, 1e-30)[:, None]
        places = (start + at)[:, None] * out_stride + (query_head * dim)[:, None] + dims[None, :]
        tl.store(out + places, result.to(out.dtype.element_ty), mask=here)


@triton.jit
def _join(
    out,
    part_sums,
    part_tops,
    part_totals,
    starts,
    lengths,
    out_stride,
    parts,
    group: tl.constexpr,
    dim: tl.constexpr,
    padded: tl.constexpr,
    row_count: tl.constexpr,
    part_tokens: tl.constexpr,
):
    """The parts of one KV head of one sequence, in their order."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    length = tl.load(lengths + sequence)
    row = tl.arange(0, row_count)
    dims = tl.arange(0, padded)
    top = tl.full([row_count], -1e30, tl.float32)
    total = tl.zeros([row_count], tl.float32)
    sums = tl.zeros([row_count, padded], tl.float32)
    first = (sequence * tl.num_programs(1) + head) * parts
    for number in range(0, tl.cdiv(length, part_tokens)):
        part = (first + number) * row_count + row
        its = tl.load(part_tops + part)
        now = tl.maximum(top, its)
        kept = tl.exp(top - now)
        joined = tl.exp(its - now)
        total = total * kept + tl.load(part_totals + part) * joined
        more = tl.load(part_sums + (part * padded)[:, None] + dims[None, :])
        sums = sums * kept[:, None] + more * joined[:, None]
        top = now
    result = sums / tl.maximum(total, 1e-30)[:, None]
    token = tl.load(starts + sequence)
    places = token * out_stride + ((head * group + row) * dim)[:, None] + dims[None, :]
    here = (row < group)[:, None] & (dims < dim)[None, :]
    tl.store(out + places, result.to(out.dtype.element_ty), mask=here)


def attend(
    query: torch.Tensor,
    place: KvPlace,
    batch: AttentionBatch,
    out: torch.Tensor,
    scale: float,
    query_longest: int | None = None,
    longest: int | None = None,
) -> None:
    """As `kernels.cpu.attention.attend`, of the place's device; `batch`'s tensors must be there too. Head sizes that
    aren't a power of two are padded to one. `query_longest`: the most query tokens of a sequence, `longest`: the most
    tokens; to find them here waits for the device. A step that only decodes takes long sequences in parts, so a
    token's result may differ in rounding from that of a step that prefills too."""
    tokens, query_heads, head_dim = query.shape
    if place.dtype not in ELEMENTS or query.dtype != place.dtype or head_dim != place.head_dim:
        raise ValueError(f"query {list(query.shape)} of {query.dtype} doesn't fit {place}")
    if not tokens:
        return
    most = query_longest or int((batch.query_starts[1:] - batch.query_starts[:-1]).max())
    group = query_heads // place.heads
    decodes = most == 1
    row_count = max(DOT_ROWS_MIN if decodes else BLOCK_ROWS, triton.next_power_of_2(group))
    query_tile = 1 if decodes else row_count // group
    parts = triton.cdiv(longest or int(batch.lengths.max()), PART_TOKENS) if decodes else 1
    padded = max(DOT_ROWS_MIN, triton.next_power_of_2(head_dim))
    split = parts > 1
    scratch = _scratch((batch.sequences, place.heads, parts, row_count), padded, query.device) if split else (out,) * 3
    strides = query.stride(0), out.stride(0), batch.slots.stride(0)
    shape = {"group": group, "dim": head_dim, "padded": padded, "row_count": row_count, "part_tokens": PART_TOKENS}
    _attend[(batch.sequences, place.heads, parts if split else triton.cdiv(most, query_tile))](
        query,
        out,
        *scratch,
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
        *strides,
        parts,
        **shape,
        query_tile=query_tile,
        tile=BLOCK_TOKENS,
        split=split,
        element=ELEMENTS[query.dtype],
        factor=tl.float32 if _WIDENS else ELEMENTS[query.dtype],
        alignment=_alignment(place),
    )
    if split:
        grid = (batch.sequences, place.heads)
        _join[grid](out, *scratch, batch.query_starts, batch.lengths, out.stride(0), parts, **shape)


def _alignment(place: KvPlace) -> int:
    """What the address of each head of each token is a multiple of, in bytes: pages begin at such ones."""
    size = place.dtype.itemsize
    distances = (place.key_offset, place.value_offset, place.token_stride, place.head_stride, place.head_dim * size)
    return ALIGNMENT if all(distance % ALIGNMENT == 0 for distance in distances) else size


def _scratch(shape: tuple[int, ...], padded: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Sums, highest scores and totals of all parts."""
    options: dict[str, Any] = {"dtype": torch.float32, "device": device}
    return torch.empty(*shape, padded, **options), torch.empty(shape, **options), torch.empty(shape, **options)


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
    alignment: tl.constexpr,
):
    token = tl.program_id(0) * tile + tl.arange(0, tile)
    head = tl.program_id(1)
    inside = token < count
    byte = tl.arange(0, padded)
    both = inside[:, None] & (byte < head_bytes)[None, :]
    slot = tl.load(slots + token, mask=inside, other=0).to(tl.int64)
    page = tl.load(pages + slot // page_tokens, mask=inside, other=0)
    base = page + offset + (slot % page_tokens) * token_stride + head * head_stride
    kept = tl.multiple_of(base.to(tl.pointer_type(tl.uint8)), alignment)[:, None] + byte[None, :]
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
            _copy[(triton.cdiv(len(slots), COPY_TOKENS), place.heads)](
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
                tile=COPY_TOKENS,
                to_slots=to_slots,
                alignment=_alignment(place),
            )
