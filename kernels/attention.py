"""Causal attention over KV slots: its arguments, and the reference in plain torch.

A batch holds sequences; each has its query tokens, which are its last ones, and finds the slot of its token t in a row
of a table. A decode step has one query token a sequence, a prefill many; both may be mixed. Query head h reads KV head
`h // (query_heads / kv_heads)`."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBatch:
    """Of one step, the same for all layers. On a CPU; int64 but for `slots`."""

    query_starts: torch.Tensor
    """[sequences + 1]: sequence i's query tokens are [starts[i], starts[i + 1])."""
    lengths: torch.Tensor
    """[sequences]: tokens so far, those of the query included."""
    slots: torch.Tensor
    """[rows, tokens], int32: a slot for each token."""
    rows: torch.Tensor
    """[sequences]: which row of `slots` is a sequence's."""

    def __post_init__(self) -> None:
        for tensor in (self.query_starts, self.lengths, self.rows):
            if tensor.dtype != torch.int64 or not tensor.is_contiguous() or tensor.dim() != 1:
                raise ValueError("query_starts, lengths and rows must be contiguous vectors of int64")
        if self.slots.dtype != torch.int32 or self.slots.dim() != 2 or self.slots.stride(1) != 1:
            raise ValueError("slots must be [rows, tokens] of int32, each row contiguous")
        if len(self.query_starts) != len(self.lengths) + 1 or len(self.rows) != len(self.lengths):
            raise ValueError("query_starts, lengths and rows don't agree")

    @property
    def sequences(self) -> int:
        """How many."""
        return len(self.lengths)


def attend_reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: AttentionBatch, scale: float
) -> torch.Tensor:
    """[tokens, query_heads, head_dim] in the query's type; computed in float64.

    query [tokens, query_heads, head_dim]; key, value [slots, kv_heads, head_dim]."""
    out = torch.empty_like(query)
    starts, lengths, rows = batch.query_starts.tolist(), batch.lengths.tolist(), batch.rows.tolist()
    for index, length in enumerate(lengths):
        tokens = slice(starts[index], starts[index + 1])
        slots = batch.slots[rows[index], :length].long()
        out[tokens] = _attend_one(query[tokens].double(), key[slots].double(), value[slots].double(), scale).to(
            out.dtype
        )
    return out


def _attend_one(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    last = torch.arange(len(key) - len(query), len(key))
    hidden = torch.arange(len(key))[None, :] > last[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)
