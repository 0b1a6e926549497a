"""Attention by flash-attn's paged kernel (FlashAttention 2), over the strided blocks of one reserved range.

flash-attn takes K and V as [pages, page_tokens, heads, head_dim] of any strides but for the last, and a table of pages
for each sequence. Its paged kernel wants pages of a multiple of 256 tokens, heads of at most 256 elements, fp16 or bf16
(`csrc/flash_attn/flash_api.cpp`, `mha_varlen_fwd`). It isn't among meshift's requirements: it is imported when asked
for."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from meshift.kernels.attention import AttentionBatch

PAGE_STEP = 256
"""A page has a multiple of so many tokens."""

HEAD_DIM_MAX = 256
TYPES = (torch.float16, torch.bfloat16)


def problem(page_tokens: int, head_dim: int, dtype: torch.dtype) -> str:
    """Why the kernel can't serve such a pool, with what would; empty if it can."""
    if page_tokens % PAGE_STEP:
        larger = -(-page_tokens // PAGE_STEP) * PAGE_STEP
        return f"flash-attn needs a page size that is a multiple of {PAGE_STEP}, such as {larger}, not {page_tokens}"
    if head_dim > HEAD_DIM_MAX:
        return f"flash-attn serves heads of at most {HEAD_DIM_MAX} elements, not {head_dim}"
    if dtype not in TYPES:
        return f"flash-attn serves float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    return ""


def paged_kernel() -> Callable[..., Any]:
    """`flash_attn_varlen_func`. Raises ImportError."""
    kernel: Callable[..., Any] = importlib.import_module("flash_attn").flash_attn_varlen_func
    return kernel


@dataclass(frozen=True, slots=True, eq=False)
class FlashBatch:
    """A step as flash-attn wants it; the same for all layers. int32, on the device."""

    query_starts: torch.Tensor
    """[sequences + 1]."""
    key_starts: torch.Tensor
    """[sequences + 1]: where each sequence's tokens would begin if they lay one after another."""
    pages: torch.Tensor
    """[sequences, pages of the longest]: token t of a sequence is in page `pages[i, t // page_tokens]`."""
    query_longest: int
    longest: int

    @classmethod
    def of(cls, batch: AttentionBatch, page_tokens: int) -> "FlashBatch":
        """Of a step whose sequences fill whole pages in order: slot of token t = page * page_tokens + t %
        page_tokens. Waits for the device once."""
        counts = batch.query_starts[1:] - batch.query_starts[:-1]
        query_longest, longest = torch.stack((counts.max(), batch.lengths.max())).tolist()
        firsts = batch.slots[batch.rows, :longest:page_tokens]
        # Beyond a sequence's end the table of slots holds anything; the kernel must not follow it.
        within = torch.arange(firsts.shape[1], device=firsts.device) * page_tokens < batch.lengths[:, None]
        pages = torch.where(within, firsts // page_tokens, torch.zeros_like(firsts))
        key_starts = torch.zeros_like(batch.query_starts, dtype=torch.int32)
        torch.cumsum(batch.lengths, 0, dtype=torch.int32, out=key_starts[1:])
        return cls(batch.query_starts.to(torch.int32), key_starts, pages.contiguous(), query_longest, longest)


def blocks(buffer: torch.Tensor, page_tokens: int) -> torch.Tensor:
    """[slots, heads, head_dim] as [pages, page_tokens, heads, head_dim], without a copy."""
    return buffer.view(-1, page_tokens, *buffer.shape[1:])


def attend(
    kernel: Callable[..., Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    batch: FlashBatch,
    scale: float,
) -> torch.Tensor:
    """[tokens, query_heads, head_dim]. query [tokens, query_heads, head_dim]; key, value: one layer's `blocks`."""
    out: torch.Tensor = kernel(
        query,
        key,
        value,
        cu_seqlens_q=batch.query_starts,
        cu_seqlens_k=batch.key_starts,
        max_seqlen_q=batch.query_longest,
        max_seqlen_k=batch.longest,
        softmax_scale=scale,
        causal=True,
        block_table=batch.pages,
    )
    return out
