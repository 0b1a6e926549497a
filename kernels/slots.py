"""Copying KV between an engine's buffers and one contiguous staging tensor: the torch reference.

    buffers   per layer (k, v), each [slots, heads, head_dim], of any strides: separate tensors, or views
    into stacked
              layers; a part of the heads is a view, `k[:, low:high]`
    slots     [tokens], int32 or int64: where token i lives; the same for all layers
    staging   [layers, tokens, 2, heads, head_dim], contiguous, K before V: the payload of a KV transfer

Values are copied as bits: every type of elements passes unchanged, NaNs and 8-bit floats included. Faster
kernels with the same signatures are checked against these functions."""

from collections.abc import Sequence

import torch

KvBuffers = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Per layer, K and V: [slots, heads, head_dim]."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def staging_shape(buffers: KvBuffers, tokens: int) -> tuple[int, int, int, int, int]:
    """The shape of a staging tensor: [layers, tokens, 2, heads, head_dim]. Raises ValueError without
    layers."""
    if not buffers:
        raise ValueError("no layers")
    _, heads, head_dim = buffers[0][0].shape
    return len(buffers), tokens, 2, heads, head_dim


def gather_slots(buffers: KvBuffers, slots: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Fill `out` with the K and V of `slots`, in their order; returns it. Slots may repeat.

    Raises ValueError for shapes, types or devices that don't fit, IndexError for a slot that doesn't exist
    (on a GPU: a device-side assertion)."""
    _check(buffers, slots, out)
    index = slots.to(torch.int64)
    for layer, pair in enumerate(buffers):
        for which, buffer in enumerate(pair):
            _bits(out)[layer, :, which].copy_(_bits(buffer).index_select(0, index))
    return out


def scatter_slots(staging: torch.Tensor, slots: torch.Tensor, buffers: KvBuffers) -> None:
    """Write the K and V in `staging` into `slots` of the buffers, in place; other slots stay as they are.

    With a slot that repeats, which of its values stays is undefined. Raises as `gather_slots`; nothing is
    written then."""
    _check(buffers, slots, staging)
    index = slots.to(torch.int64)
    slot_count = buffers[0][0].shape[0]
    if index.device.type == "cpu" and index.numel() and not 0 <= int(index.min()) <= int(index.max()) < slot_count:
        raise IndexError(f"slots must be within [0, {slot_count})")
    for layer, pair in enumerate(buffers):
        for which, buffer in enumerate(pair):
            _bits(buffer).index_copy_(0, index, _bits(staging)[layer, :, which])


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same size; indexing isn't implemented for all types of elements."""
    return tensor.view(_BITS[tensor.element_size()])


def _check(buffers: KvBuffers, slots: torch.Tensor, staging: torch.Tensor) -> None:
    if slots.dim() != 1 or slots.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"slots must be [tokens] of int32 or int64, not {list(slots.shape)} of {slots.dtype}")
    expected = staging_shape(buffers, slots.shape[0])
    if tuple(staging.shape) != expected or not staging.is_contiguous():
        raise ValueError(f"staging must be contiguous {list(expected)}, not {list(staging.shape)}")
    first = buffers[0][0]
    for tensor in (tensor for pair in buffers for tensor in pair):
        if tensor.shape != first.shape:
            raise ValueError(f"buffers differ: {list(tensor.shape)} and {list(first.shape)}")
        if (tensor.dtype, tensor.device) != (staging.dtype, staging.device):
            raise ValueError(
                f"buffer is {tensor.dtype} on {tensor.device}, staging {staging.dtype} on {staging.device}"
            )
    if slots.device != staging.device:
        raise ValueError(f"slots are on {slots.device}, staging on {staging.device}")
