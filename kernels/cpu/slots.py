"""Gather and scatter of slots in C++, with the signatures of the reference, `kernels/slots.py`; and over places."""

import ctypes
import threading
from collections.abc import Sequence

import torch

from meshift.kernels.cpu.attention import place_struct
from meshift.kernels.cpu.library import CopyStruct, PlaceStruct, StoreStruct, load
from meshift.kernels.places import KvPlace
from meshift.kernels.slots import KvBuffers


def gather_slots(buffers: KvBuffers, slots: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """As the reference: fill `out` [layers, tokens, 2, heads, head_dim]; raises ValueError and IndexError alike."""
    gather_places([KvPlace.of_buffers(*pair) for pair in buffers], slots, out)
    return out


def scatter_slots(staging: torch.Tensor, slots: torch.Tensor, buffers: KvBuffers) -> None:
    """As the reference: write `staging` into the slots; raises ValueError and IndexError alike."""
    scatter_places(staging, slots, [KvPlace.of_buffers(*pair) for pair in buffers])


def gather_places(places: Sequence[KvPlace], slots: torch.Tensor, out: torch.Tensor) -> None:
    """Fill `out` [layers, tokens, 2, heads, head_dim] from `slots` of a place for each layer.

    Values pass as bytes. Slots may repeat. Raises ValueError for shapes or types that don't fit, IndexError for a slot
    that doesn't exist, KernelUnavailable."""
    _copy(places, slots, out, to_slots=0)


def scatter_places(staging: torch.Tensor, slots: torch.Tensor, places: Sequence[KvPlace]) -> None:
    """Write `staging` [layers, tokens, 2, heads, head_dim] into `slots` of the places. Raises as `gather_places`;
    nothing is written then. With a slot that repeats, which of its values stays is undefined."""
    _copy(places, slots, staging, to_slots=1)


def store_tokens(place: KvPlace, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Write K and V of new tokens, each [tokens, heads, head_dim], into one layer's slots (int64).

    For the engine's step: shapes and types are checked, the slots aren't. Raises ValueError."""
    heads, head_dim, dtype = place.heads, place.head_dim, place.dtype
    tokens = slots.numel()
    shape = (tokens, heads, head_dim)
    if slots.dtype != torch.int64 or not slots.is_contiguous():
        raise ValueError(f"slots must be contiguous int64, not {slots.dtype}")
    strides = []
    for tensor in (key, value):
        if tensor.shape != shape or tensor.dtype != dtype:
            raise ValueError(f"{list(tensor.shape)} of {tensor.dtype} doesn't fit {list(shape)} of {dtype}")
        to_token, to_head, to_element = tensor.stride()
        if to_element != 1 or (to_head != head_dim and heads > 1):
            raise ValueError(f"strides {tensor.stride()} don't fit: a token's heads must be contiguous")
        strides.append(to_token * dtype.itemsize)
    call = StoreStruct(
        place_struct(place),
        slots.data_ptr(),
        tokens,
        heads,
        head_dim * dtype.itemsize,
        key.data_ptr(),
        value.data_ptr(),
        *strides,
    )
    load().meshift_store(ctypes.byref(call))


def _copy(places: Sequence[KvPlace], slots: torch.Tensor, staging: torch.Tensor, to_slots: int) -> None:
    index = _checked(places, slots, staging)
    first = places[0]
    structs = (PlaceStruct * len(places))(*map(place_struct, places))
    call = CopyStruct(
        structs,
        len(places),
        index.data_ptr(),
        len(index),
        first.heads,
        first.head_dim * staging.element_size(),
        staging.data_ptr(),
        to_slots,
        _threads(),
    )
    load().meshift_copy(ctypes.byref(call))


def _threads() -> int:
    """A thread beside the one that computes copies alone: a team of its own would take the computing one's cores."""
    return torch.get_num_threads() if threading.current_thread() is threading.main_thread() else 1


def _checked(places: Sequence[KvPlace], slots: torch.Tensor, staging: torch.Tensor) -> torch.Tensor:
    """The slots as contiguous int64, if everything fits."""
    if not places:
        raise ValueError("no layers")
    if slots.dim() != 1 or slots.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"slots must be [tokens] of int32 or int64, not {list(slots.shape)} of {slots.dtype}")
    first = places[0]
    expected = (len(places), len(slots), 2, first.heads, first.head_dim)
    if tuple(staging.shape) != expected or not staging.is_contiguous() or staging.device.type != "cpu":
        raise ValueError(f"staging must be contiguous {list(expected)} on the CPU, not {list(staging.shape)}")
    for place in places:
        if (place.heads, place.head_dim, place.dtype) != (first.heads, first.head_dim, staging.dtype):
            raise ValueError(f"places differ, or from the staging's {staging.dtype}: {place}")
    slot_count = min(place.slots for place in places)
    if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < slot_count:
        raise IndexError(f"slots must be within [0, {slot_count})")
    return slots.to(torch.int64).contiguous()
