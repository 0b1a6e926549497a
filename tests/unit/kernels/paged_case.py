"""Sequences on pages that are allocations of their own, as an arena has them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshift.kernels.attention import AttentionBatch
from meshift.kernels.places import KvPlace

LAYERS = 2


@dataclass
class PagedCase:
    """Blocks [page_tokens, layers, 2, heads, dim], a batch on random slots of them, and its queries."""

    blocks: list[torch.Tensor]
    batch: AttentionBatch
    query: torch.Tensor

    @classmethod
    def make(
        cls,
        lengths: Sequence[int],
        query_lengths: Sequence[int],
        *,
        page_tokens: int,
        heads: int,
        group: int,
        dim: int,
        dtype: torch.dtype,
        device: str = "cpu",
    ) -> "PagedCase":
        """Seeded; two pages more than needed."""
        generator = torch.Generator().manual_seed(4)
        pages = -(-sum(lengths) // page_tokens) + 2
        shape = (page_tokens, LAYERS, 2, heads, dim)
        blocks = [torch.randn(shape, generator=generator).to(dtype).to(device) for _ in range(pages)]
        order = torch.randperm(pages * page_tokens, generator=generator).to(torch.int32)
        table = torch.zeros(len(lengths), max(lengths), dtype=torch.int32)
        taken = 0
        for row, length in enumerate(lengths):
            table[row, :length] = order[taken : taken + length]
            taken += length
        starts = torch.tensor([0, *torch.tensor(query_lengths).cumsum(0).tolist()])
        rows = torch.arange(len(lengths))
        batch = AttentionBatch(
            starts.to(device), torch.tensor(list(lengths)).to(device), table.to(device), rows.to(device)
        )
        query = torch.randn(sum(query_lengths), group * heads, dim, generator=generator).to(dtype).to(device)
        return cls(blocks, batch, query)

    @property
    def slots(self) -> int:
        """How many."""
        return len(self.blocks) * int(self.blocks[0].shape[0])

    def place(self, layer: int) -> KvPlace:
        """One layer, by the blocks' addresses."""
        block = self.blocks[0]
        size = block.element_size()
        strides: list[Any] = [stride * size for stride in block.stride()]
        return KvPlace(
            pages=torch.tensor([block.data_ptr() for block in self.blocks]).to(block.device),
            page_tokens=int(block.shape[0]),
            key_offset=layer * strides[1],
            value_offset=layer * strides[1] + strides[2],
            token_stride=strides[0],
            head_stride=strides[3],
            slots=self.slots,
            heads=int(block.shape[3]),
            head_dim=int(block.shape[4]),
            dtype=block.dtype,
        )

    def whole(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer's K and V, [slots, heads, dim]."""
        stack = torch.cat(self.blocks)
        return stack[:, layer, 0], stack[:, layer, 1]
