"""What a move moves: a rectangle of the KV matrix, layers x slots x KV heads."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Layers [layer_start, layer_end) x tokens [token_start, token_end) x KV heads [head_start, head_end).

    Tokens are indices within the request; each end maps them to its own slots."""

    layer_start: int
    layer_end: int
    token_start: int
    token_end: int
    head_start: int
    head_end: int

    def __post_init__(self) -> None:
        for low, high, name in (
            (self.layer_start, self.layer_end, "layers"),
            (self.token_start, self.token_end, "tokens"),
            (self.head_start, self.head_end, "heads"),
        ):
            if not 0 <= low <= high:
                raise ValueError(f"{name} [{low}, {high}) is not a range")

    @property
    def layers(self) -> int:
        return self.layer_end - self.layer_start

    @property
    def tokens(self) -> int:
        return self.token_end - self.token_start

    @property
    def heads(self) -> int:
        return self.head_end - self.head_start

    @property
    def empty(self) -> bool:
        return not (self.layers and self.tokens and self.heads)

    def intersect(self, other: "Rectangle") -> "Rectangle":
        """What both hold; may be empty."""

        def overlap(a: int, b: int, c: int, d: int) -> tuple[int, int]:
            low, high = max(a, c), min(b, d)
            return (low, high) if low <= high else (low, low)

        layers = overlap(self.layer_start, self.layer_end, other.layer_start, other.layer_end)
        tokens = overlap(self.token_start, self.token_end, other.token_start, other.token_end)
        heads = overlap(self.head_start, self.head_end, other.head_start, other.head_end)
        return Rectangle(*layers, *tokens, *heads)


def _covered_once(whole: Rectangle, pieces: Sequence[Rectangle]) -> bool:
    """Whether the pieces, all within `whole`, are disjoint and fill it."""
    disjoint = all(one.intersect(other).empty for one, other in combinations(pieces, 2))
    volume = sum(piece.layers * piece.tokens * piece.heads for piece in pieces)
    return disjoint and volume == whole.layers * whole.tokens * whole.heads


def cut(
    whole: Rectangle, sources: Sequence[Rectangle], destinations: Sequence[Rectangle]
) -> list[tuple[int, int, Rectangle]]:
    """Cut `whole` by owner on both sides: (source rank, destination rank, piece), none empty.

    Raises ValueError if a side doesn't cover `whole` exactly once."""
    for side, owned in (("source", sources), ("destination", destinations)):
        if not _covered_once(whole, [whole.intersect(part) for part in owned]):
            raise ValueError(f"{side} ranks do not cover {whole} exactly once")
    pairs = [
        (i, j, whole.intersect(source).intersect(destination))
        for i, source in enumerate(sources)
        for j, destination in enumerate(destinations)
    ]
    return [(i, j, piece) for i, j, piece in pairs if not piece.empty]
