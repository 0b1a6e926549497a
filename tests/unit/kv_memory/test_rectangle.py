"""Rectangles and `cut`: any pair of layouts covers what moves exactly once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshift.kv_memory.layout import Range, rank_rectangles, split_evenly
from meshift.kv_memory.rectangle import Rectangle, cut

LAYERS_MAX, HEADS_MAX, TOKENS_MAX = 12, 8, 9


@st.composite
def splits(draw: st.DrawFn, count: int) -> list[Range]:
    """[0, count) cut at random places; parts may be empty."""
    cuts = sorted(draw(st.lists(st.integers(0, count), max_size=4)))
    return list(zip([0, *cuts], [*cuts, count], strict=True))


@st.composite
def layout_pairs(draw: st.DrawFn) -> tuple[Rectangle, list[Rectangle], list[Rectangle]]:
    """What moves (all layers and heads, some tokens), and two layouts that hold it."""
    layers, heads = draw(st.integers(1, LAYERS_MAX)), draw(st.integers(1, HEADS_MAX))
    tokens = draw(st.integers(1, TOKENS_MAX))
    start = draw(st.integers(0, tokens))
    whole = Rectangle(0, layers, start, draw(st.integers(start, tokens)), 0, heads)
    source, destination = (rank_rectangles(draw(splits(layers)), draw(splits(heads)), tokens) for _ in range(2))
    return whole, source, destination


def cells(rectangle: Rectangle) -> tuple[slice, slice, slice]:
    return (
        slice(rectangle.layer_start, rectangle.layer_end),
        slice(rectangle.token_start, rectangle.token_end),
        slice(rectangle.head_start, rectangle.head_end),
    )


def paint(rectangles: list[Rectangle]) -> "np.ndarray[tuple[int, int, int], np.dtype[np.int64]]":
    """How often each cell is covered."""
    counts = np.zeros((LAYERS_MAX, TOKENS_MAX, HEADS_MAX), np.int64)
    for rectangle in rectangles:
        counts[cells(rectangle)] += 1
    return counts


@given(layout_pairs())
def test_cut_covers_exactly_once(case: tuple[Rectangle, list[Rectangle], list[Rectangle]]) -> None:
    whole, source, destination = case
    pieces = cut(whole, source, destination)
    assert np.array_equal(paint([piece for _, _, piece in pieces]), paint([whole]))


@given(layout_pairs())
def test_cut_gives_each_piece_to_its_owners(
    case: tuple[Rectangle, list[Rectangle], list[Rectangle]],
) -> None:
    whole, source, destination = case
    pieces = cut(whole, source, destination)
    assert len({(i, j) for i, j, _ in pieces}) == len(pieces)
    for i, j, piece in pieces:
        assert not piece.empty
        assert source[i].intersect(piece) == piece
        assert destination[j].intersect(piece) == piece


@given(layout_pairs(), st.data())
def test_cut_refuses_a_side_that_does_not_cover(
    case: tuple[Rectangle, list[Rectangle], list[Rectangle]], data: st.DataObject
) -> None:
    whole, source, destination = case
    index = data.draw(st.integers(0, len(source) - 1))
    if whole.intersect(source[index]).empty:
        return
    missing = [*source[:index], *source[index + 1 :]]
    doubled = [*source, source[index]]
    for broken in (missing, doubled):
        with pytest.raises(ValueError, match="source"):
            cut(whole, broken, destination)
        with pytest.raises(ValueError, match="destination"):
            cut(whole, destination, broken)


def test_cut_refuses_a_hole_that_an_overlap_makes_up_for() -> None:
    whole = Rectangle(0, 2, 0, 4, 0, 1)
    lower = Rectangle(0, 1, 0, 4, 0, 1)
    with pytest.raises(ValueError, match="destination"):
        cut(whole, [whole], [lower, lower])


@given(
    *(
        st.builds(
            lambda *ends: Rectangle(*(end for low, high in ends for end in sorted((low, high)))),
            st.tuples(st.integers(0, LAYERS_MAX), st.integers(0, LAYERS_MAX)),
            st.tuples(st.integers(0, TOKENS_MAX), st.integers(0, TOKENS_MAX)),
            st.tuples(st.integers(0, HEADS_MAX), st.integers(0, HEADS_MAX)),
        )
        for _ in range(2)
    )
)
def test_intersection_is_what_both_hold(one: Rectangle, other: Rectangle) -> None:
    both = one.intersect(other)
    assert np.array_equal(paint([both]), paint([one]) * paint([other]))
    assert both.empty == (not paint([both]).any())


@pytest.mark.parametrize("ends", [(1, 0, 0, 1, 0, 1), (0, 1, -1, 1, 0, 1), (0, 1, 0, 1, 3, 2)])
def test_backward_range_is_refused(ends: tuple[int, int, int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="is not a range"):
        Rectangle(*ends)


def test_ranks_are_stage_major() -> None:
    assert rank_rectangles([(0, 4), (4, 6)], [(0, 2), (2, 4)], 10) == [
        Rectangle(0, 4, 0, 10, 0, 2),
        Rectangle(0, 4, 0, 10, 2, 4),
        Rectangle(4, 6, 0, 10, 0, 2),
        Rectangle(4, 6, 0, 10, 2, 4),
    ]


@pytest.mark.parametrize("ranges", [[], [(1, 2)], [(0, 2), (3, 4)], [(0, 2), (1, 4)]])
def test_gaps_and_overlaps_between_ranks_are_refused(ranges: list[Range]) -> None:
    with pytest.raises(ValueError, match="layers"):
        rank_rectangles(ranges, [(0, 1)], 4)
    with pytest.raises(ValueError, match="heads"):
        rank_rectangles([(0, 1)], ranges, 4)


@given(st.integers(0, 100), st.integers(1, 12))
def test_even_split(count: int, parts: int) -> None:
    ranges = split_evenly(count, parts)
    sizes = [end - start for start, end in ranges]
    assert len(ranges) == parts
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    assert [n for start, end in ranges for n in range(start, end)] == list(range(count))
