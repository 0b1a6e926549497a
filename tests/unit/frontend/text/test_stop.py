"""Stop strings across the borders of what arrives."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshift.services.frontend.text.stop import StopFilter

TEXTS = st.text(alphabet="ab😀", max_size=24)
STOPS = st.lists(st.text(alphabet="ab😀", min_size=1, max_size=5), max_size=4)


def reference(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """By trying every prefix: the text before the stop string that ends first, and the longest such string."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def pieces(text: str, cuts: Sequence[int]) -> list[str]:
    """The text, cut."""
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(bounds)]


@settings(deadline=None)
@given(text=TEXTS, stops=STOPS, cuts=st.lists(st.integers(0, 24), max_size=6))
def test_any_cut_gives_what_the_whole_text_gives(text: str, stops: list[str], cuts: list[int]) -> None:
    stop_filter = StopFilter(stops)
    out = "".join(stop_filter.push(piece) for piece in pieces(text, cuts))
    assert (out + stop_filter.flush(), stop_filter.matched) == reference(text, stops)


@settings(deadline=None)
@given(text=TEXTS, stops=STOPS)
def test_only_what_may_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    stop_filter = StopFilter(stops)
    seen, out = "", ""
    for char in text:
        seen += char
        out += stop_filter.push(char)
        if stop_filter.matched is not None:
            break
        starts = [stop[:length] for stop in stops for length in range(1, len(stop))]
        longest = max((len(start) for start in starts if seen.endswith(start)), default=0)
        assert out == seen[: len(seen) - longest]


def test_a_stop_string_over_three_pieces_is_not_half_emitted() -> None:
    stop_filter = StopFilter(["<stop>"])
    assert [stop_filter.push(piece) for piece in ("one <st", "o", "p> two")] == ["one ", "", ""]
    assert stop_filter.matched == "<stop>"
    assert stop_filter.push("three") == ""
    assert stop_filter.flush() == ""


def test_a_false_start_is_let_through() -> None:
    stop_filter = StopFilter(["<stop>"])
    assert [stop_filter.push(piece) for piece in ("<st", "ay>", "<")] == ["", "<stay>", ""]
    assert stop_filter.flush() == "<"
    assert stop_filter.matched is None


def test_of_two_that_end_together_the_longer_one_counts() -> None:
    stop_filter = StopFilter(["c", "abc"])
    assert stop_filter.push("xabc") == "x"
    assert stop_filter.matched == "abc"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopFilter(["a", ""])
