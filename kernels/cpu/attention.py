"""Causal attention on a CPU over block addresses or strided slots; the reference is `kernels/attention.py`."""

import ctypes

import torch

from meshift.kernels.attention import AttentionBatch
from meshift.kernels.cpu.library import (
    DIM_MAX,
    AttentionStruct,
    InstructionSet,
    PlaceStruct,
    best_instruction_set,
    load,
)
from meshift.kernels.places import KvPlace

ELEMENTS = {torch.float32: 0, torch.bfloat16: 1}
"""The types that the kernel computes on; it accumulates in float32."""


def place_struct(place: KvPlace) -> PlaceStruct:
    """For the library's calls."""
    return PlaceStruct(
        place.pages.data_ptr(),
        place.page_tokens,
        place.key_offset,
        place.value_offset,
        place.token_stride,
        place.head_stride,
    )


def supports(place: KvPlace, query_heads: int) -> bool:
    """Whether `attend` takes these: type, head size, and whole groups of query heads."""
    return place.dtype in ELEMENTS and 0 < place.head_dim <= DIM_MAX and query_heads % place.heads == 0


def attend(
    query: torch.Tensor,
    place: KvPlace,
    batch: AttentionBatch,
    out: torch.Tensor,
    scale: float,
    instruction_set: InstructionSet | None = None,
) -> None:
    """Fill `out`; query and out are [tokens, query_heads, head_dim], of the place's type, a token's heads contiguous.

    The slots named by the batch must exist: they are not checked, as nothing else of the batch's contents. The result
    of a token doesn't depend on what else is in the batch. Uses torch's number of threads. Raises ValueError for shapes
    or types that don't fit, KernelUnavailable."""
    _, query_heads, head_dim = query.shape
    if not supports(place, query_heads) or query.dtype != place.dtype or head_dim != place.head_dim:
        raise ValueError(f"query {list(query.shape)} of {query.dtype} doesn't fit {place}")
    for tensor in (query, out):
        _, to_head, to_element = tensor.stride()
        if to_element != 1 or (to_head != head_dim and query_heads > 1) or tensor.shape != query.shape:
            raise ValueError("a token's heads must be contiguous, in query and out alike")
    if out.dtype != query.dtype:
        raise ValueError(f"out is {out.dtype}, query {query.dtype}")
    call = AttentionStruct(
        place_struct(place),
        ELEMENTS[query.dtype],
        batch.sequences,
        query_heads,
        place.heads,
        head_dim,
        query.data_ptr(),
        query.stride(0),
        out.data_ptr(),
        out.stride(0),
        batch.query_starts.data_ptr(),
        batch.lengths.data_ptr(),
        batch.slots.data_ptr(),
        batch.slots.stride(0),
        batch.rows.data_ptr(),
        scale,
        torch.get_num_threads(),
        best_instruction_set() if instruction_set is None else instruction_set,
    )
    load().meshift_attention(ctypes.byref(call))
