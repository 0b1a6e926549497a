"""Chunks to text: finishes, trimming, counts."""

import pytest

from meshift.schemas.errors import InternalError, Unavailable
from meshift.schemas.requests import Finish, FinishReason
from meshift.services.frontend.api import Chunk
from meshift.services.frontend.text.output import OutputText, TextDelta
from meshift.services.frontend.text.tokenizer import ChatTokenizer

END = 2
"""The tiny model's `<|end|>`."""


def output_of(tiny: ChatTokenizer, *stops: str) -> OutputText:
    return OutputText(tiny.detokenizer(), stops)


def stop_finish(matched: str | int | None = None) -> Finish:
    return Finish(reason=FinishReason.STOP, matched_stop=matched, cached_tokens=7)


def test_text_grows_and_ends_with_the_engine_s_finish(tiny: ChatTokenizer) -> None:
    tokens = tiny.encode("Paris is the capital")
    output = output_of(tiny)
    first = output.feed(Chunk(0, tokens[:2]))
    last = output.feed(Chunk(2, [*tokens[2:], END], stop_finish(END)))
    assert first.text + last.text == "Paris is the capital"
    assert (first.finish, last.finish) == (None, "stop")
    assert (output.token_count, output.cached_tokens) == (len(tokens) + 1, 7)
    assert output.finished
    assert output.done


def test_a_visible_stop_token_is_trimmed_but_counted(tiny: ChatTokenizer) -> None:
    tokens = tiny.encode("ab.")
    output = output_of(tiny)
    assert output.feed(Chunk(0, tokens, stop_finish(tokens[-1]))) == TextDelta("ab", "stop")
    assert output.token_count == len(tokens)


def test_the_same_token_is_not_trimmed_when_the_length_ended_it(tiny: ChatTokenizer) -> None:
    tokens = tiny.encode("ab.")
    finish = Finish(reason=FinishReason.LENGTH, matched_stop=tokens[-1])
    assert output_of(tiny).feed(Chunk(0, tokens, finish)) == TextDelta("ab.", "length")


def test_an_incomplete_character_is_flushed_at_the_end(tiny: ChatTokenizer) -> None:
    tokens = tiny.encode("a😀")[:-1]
    output = output_of(tiny)
    assert output.feed(Chunk(0, tokens)).text == "a"
    assert output.feed(Chunk(len(tokens), (), Finish(reason=FinishReason.LENGTH))) == TextDelta("�", "length")


@pytest.mark.parametrize("size", [1, 2, 100])
def test_a_stop_string_that_the_engine_found_is_trimmed(tiny: ChatTokenizer, size: int) -> None:
    tokens = tiny.encode("over the lazy dog")
    output = output_of(tiny, "lazy dog")
    text, finish = "", None
    for start in range(0, len(tokens), size):
        last = start + size >= len(tokens)
        chunk = Chunk(start, tokens[start : start + size], stop_finish("lazy dog") if last else None)
        delta = output.feed(chunk)
        text, finish = text + delta.text, delta.finish
    assert (text, finish) == ("over the ", "stop")
    assert output.finished


def test_a_stop_string_that_the_engine_missed_ends_it_here(tiny: ChatTokenizer) -> None:
    tokens = tiny.encode("over the lazy dog. More and more")
    stop = tiny.encode("over the lazy dog.")
    assert tokens[: len(stop)] == stop
    output = output_of(tiny, "y dog")
    assert output.feed(Chunk(0, tokens)) == TextDelta("over the laz", "stop")
    assert output.done
    assert not output.finished
    assert output.token_count == len(stop) - 1


def test_a_stop_string_in_the_flushed_tail_counts(tiny: ChatTokenizer) -> None:
    tokens = tiny.encode("ab😀")[:-1]
    output = output_of(tiny, "b�")
    assert output.feed(Chunk(0, tokens, Finish(reason=FinishReason.LENGTH))) == TextDelta("a", "stop")


def test_the_beginning_of_a_stop_string_comes_out_at_the_end(tiny: ChatTokenizer) -> None:
    tokens = tiny.encode("over the")
    output = output_of(tiny, "the end")
    assert output.feed(Chunk(0, tokens)).text == "over "
    assert output.feed(Chunk(len(tokens), (END,), stop_finish(END))) == TextDelta("the", "stop")


def test_special_tokens_in_the_middle_have_no_text(tiny: ChatTokenizer) -> None:
    tokens = [*tiny.encode("a"), END, *tiny.encode("b")]
    assert output_of(tiny).feed(Chunk(0, tokens, Finish(reason=FinishReason.LENGTH))).text == "ab"


def test_failures_are_raised(tiny: ChatTokenizer) -> None:
    with pytest.raises(InternalError, match="out of memory"):
        output_of(tiny).feed(Chunk(0, (), Finish(reason=FinishReason.ERROR, message="out of memory")))
    with pytest.raises(Unavailable, match="cancelled by the server"):
        output_of(tiny).feed(Chunk(0, (), Finish(reason=FinishReason.CANCELLED)))


@pytest.mark.parametrize("start", [0, 2])
def test_a_repetition_or_a_gap_is_an_error(tiny: ChatTokenizer, start: int) -> None:
    output = output_of(tiny)
    output.feed(Chunk(0, (5,)))
    with pytest.raises(InternalError, match="after 1 tokens"):
        output.feed(Chunk(start, (6,)))


def test_nothing_may_follow_the_finish(tiny: ChatTokenizer) -> None:
    output = output_of(tiny)
    output.feed(Chunk(0, (), stop_finish()))
    with pytest.raises(InternalError):
        output.feed(Chunk(0, (6,)))
