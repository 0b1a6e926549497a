"""Where K and V are: what attention and copies are told of one layer's memory."""

from dataclasses import dataclass, field, replace

import torch

ONE_PAGE = 1 << 62
"""Tokens of the only page of slots that are addressed by a stride."""


@dataclass(frozen=True, slots=True, eq=False)
class KvPlace:
    """One layer's K and V, each `heads` x `head_dim` elements for a slot; a head's elements are contiguous.

    Slot s is token `s % page_tokens` of page `s // page_tokens`. The pages are independent allocations on one device,
    found by their addresses; offsets and strides are in bytes. Whoever makes one keeps its memory alive."""

    pages: torch.Tensor
    """[pages], int64: addresses."""
    page_tokens: int
    key_offset: int
    value_offset: int
    token_stride: int
    head_stride: int
    slots: int
    """How many there are; others must not be asked for."""
    heads: int
    head_dim: int
    dtype: torch.dtype
    memory: tuple[torch.Tensor, ...] = field(default=(), repr=False)
    """Kept alive along with this."""

    @classmethod
    def of_buffers(cls, key: torch.Tensor, value: torch.Tensor) -> "KvPlace":
        """Of [slots, heads, head_dim] tensors, of any strides but for the last. Raises ValueError unless both are
        alike."""
        slots, heads, head_dim = key.shape
        if key.shape != value.shape or key.stride() != value.stride() or key.dtype != value.dtype:
            raise ValueError(f"K {list(key.shape)} {key.stride()} and V {list(value.shape)} {value.stride()} differ")
        if key.stride(2) != 1:
            raise ValueError("a head's elements must be contiguous")
        size = key.element_size()
        base = key.data_ptr()
        return cls(
            pages=torch.tensor([base], dtype=torch.int64),
            page_tokens=ONE_PAGE,
            key_offset=0,
            value_offset=value.data_ptr() - base,
            token_stride=key.stride(0) * size,
            head_stride=key.stride(1) * size,
            slots=slots,
            heads=heads,
            head_dim=head_dim,
            dtype=key.dtype,
            memory=(key, value),
        )

    def to(self, device: "torch.device | str") -> "KvPlace":
        """With the table of addresses where a kernel of that device reads it."""
        return replace(self, pages=self.pages.to(device))


class LayerPlaces:
    """The places of an engine's layers, which are asked for at every step: made once for each buffer."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[torch.Tensor, KvPlace]] = {}

    def of(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> KvPlace | None:
        """Of the buffers that a layer has now; a pool may put others in place. None: `KvPlace` can't tell of them."""
        known = self._known.get(layer)
        if known is not None and known[0] is key:
            return known[1]
        try:
            place = KvPlace.of_buffers(key, value)
        except ValueError:
            return None
        self._known[layer] = (key, place)
        return place
