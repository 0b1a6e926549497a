"""Which rectangle of a request's KV each rank of an instance owns: pipeline stages own layers,
tensor-parallel ranks KV heads.

        heads     0 1 | 2 3
    layers 0-3   rank 0 | rank 1     stage 0
    layers 4-5   rank 2 | rank 3     stage 1

Ranks are numbered stage-major, as SGLang numbers them. A KV head has one owner: tensor parallelism beyond
the number of KV heads, where ranks hold copies of a head, is not expressed here and `cut` refuses it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from meshift.kv_memory.rectangle import Rectangle

Range = tuple[int, int]
"""[start, end)."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """How the ranks of one instance share the KV matrix, and what a cell of it is."""

    layer_ranges: tuple[Range, ...]
    """Of each pipeline stage."""
    head_ranges: tuple[Range, ...]
    """Of each tensor-parallel rank."""
    head_dim: int
    dtype: str
    """Of the elements, as torch names it without its prefix: `bfloat16`."""
    weights: str
    """Fingerprint of the model: KV means something to equal weights only."""

    def rectangles(self, tokens: int) -> list[Rectangle]:
        """What each rank owns of a request of that many tokens, in rank order."""
        return rank_rectangles(self.layer_ranges, self.head_ranges, tokens)

    def mismatch(self, other: "KvLayout") -> str:
        """Why KV can't go from one to the other, or "". The cuts may differ; the matrix may not."""
        here = (self.layer_ranges[-1][1], self.head_ranges[-1][1], self.head_dim, self.dtype, self.weights)
        there = (other.layer_ranges[-1][1], other.head_ranges[-1][1], other.head_dim, other.dtype, other.weights)
        names = ("layers", "KV heads", "head size", "element type", "weights")
        differing = [f"{name} {a} and {b}" for name, a, b in zip(names, here, there, strict=True) if a != b]
        return f"different {', '.join(differing)}" if differing else ""


def rank_rectangles(layer_ranges: Sequence[Range], head_ranges: Sequence[Range], tokens: int) -> list[Rectangle]:
    """The rectangles of all ranks, in rank order, for `tokens` tokens. A stage's range may be empty.

    Raises ValueError if the stages' layers, or the tensor ranks' heads, don't follow one another without
    gap."""
    _check_contiguous("layers", layer_ranges)
    _check_contiguous("heads", head_ranges)
    return [Rectangle(*layers, 0, tokens, *heads) for layers in layer_ranges for heads in head_ranges]


def split_evenly(count: int, parts: int) -> list[Range]:
    """[0, count) in `parts` ranges, of sizes that differ by one at most, the larger ones first."""
    size, larger = divmod(count, parts)
    starts = [part * size + min(part, larger) for part in range(parts + 1)]
    return list(pairwise(starts))


def _check_contiguous(name: str, ranges: Sequence[Range]) -> None:
    if not ranges or ranges[0][0] != 0:
        raise ValueError(f"{name} {list(ranges)} don't start at 0")
    if any(before[1] != after[0] for before, after in pairwise(ranges)):
        raise ValueError(f"{name} {list(ranges)} don't follow one another")
