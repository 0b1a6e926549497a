"""Log-probabilities of an answer's tokens."""

from typing import Any

import pytest

from meshift.schemas.requests import FinishReason
from meshift.services.frontend.api import Chunk
from meshift.services.frontend.http.forms import LOGPROB_MIN, finite
from tests.unit.frontend.fake_frontend import STOPPED, Emit, Raw, logprob_of
from tests.unit.frontend.http.harness import (
    HELLO,
    Shell,
    choices_of,
    ended,
    error_of,
    events_of,
    last_request,
)

ANSWER = "The capital 😀 Paris"
ASK: dict[str, Any] = {**HELLO, "logprobs": True, "top_logprobs": 2}


def entry(shell: Shell, token: int, value: float) -> dict[str, Any]:
    raw = shell.tokenizer.token_bytes(token)
    return {"token": raw.decode(errors="replace"), "logprob": value, "bytes": list(raw)}


def scored(shell: Shell, token: int, top: int) -> dict[str, Any]:
    logprob = logprob_of(token, top)
    return {**entry(shell, token, logprob.value), "top_logprobs": [entry(shell, *pair) for pair in logprob.top]}


@pytest.mark.parametrize("top", [0, 2])
async def test_of_a_whole_chat_answer(shell: Shell, top: int) -> None:
    shell.plays(*shell.say(ANSWER))
    choice = (await shell.post({**ASK, "top_logprobs": top})).json()["choices"][0]
    assert last_request(shell).sampling.logprobs == top
    content = choice["logprobs"]["content"]
    assert content == [scored(shell, token, top) for token in shell.tokenizer.encode(ANSWER)]
    assert b"".join(bytes(item["bytes"]) for item in content).decode() == ANSWER


@pytest.mark.parametrize("size", [1, 2, 100])
@pytest.mark.parametrize("stop", [[], ["zzz"], ["capital of"], ["l"], ["The cap "]])
async def test_in_a_stream_each_event_has_those_of_its_text(shell: Shell, size: int, stop: list[str]) -> None:
    """They come with the text that completes their token, however long a stop string holds it back."""
    shell.plays(*shell.say(ANSWER, size=size))
    events = events_of((await shell.post({**ASK, "stream": True, "stop": stop})).text)
    text, raw = "", b""
    for choice in choices_of(events, 0)[1:-1]:
        text += choice["delta"]["content"]
        raw += b"".join(bytes(item["bytes"]) for item in choice["logprobs"]["content"])
        if stop != ["l"]:
            assert text.startswith(raw.decode()), "an event has whole characters"
            assert len(text) - len(raw.decode()) < len(" capital"), "no token waits for longer than its own text"
    if stop != ["l"]:
        assert raw.decode() == text


async def test_tokens_behind_a_stop_string_have_none(shell: Shell) -> None:
    shell.plays(*shell.say("one two three four"))
    choice = (await shell.post({**ASK, "stop": ["three"]})).json()["choices"][0]
    assert choice["message"]["content"] == "one two "
    text = b"".join(bytes(item["bytes"]) for item in choice["logprobs"]["content"]).decode()
    assert text.startswith("one two")
    assert "four" not in text
    assert len(text) <= len("one two three")


async def test_an_end_of_sequence_token_has_none(shell: Shell) -> None:
    shell.plays(*shell.say("Paris")[:-1], Emit((2,), ended(FinishReason.STOP, matched_stop=2)))
    choice = (await shell.post(ASK)).json()["choices"][0]
    assert [item["token"] for item in choice["logprobs"]["content"]][-1] != "<|end|>"


async def test_of_a_plain_completion(shell: Shell) -> None:
    shell.plays(*shell.say(ANSWER))
    choice = (await shell.post_text(prompt="x", logprobs=1)).json()["choices"][0]
    logprobs, tokens = choice["logprobs"], shell.tokenizer.encode(ANSWER)
    assert logprobs["token_logprobs"] == [logprob_of(token, 1).value for token in tokens]
    assert [len(top) for top in logprobs["top_logprobs"]] == [1] * len(tokens)
    assert all(
        top[name] == value
        for top, name, value in zip(
            logprobs["top_logprobs"], logprobs["tokens"], logprobs["token_logprobs"], strict=True
        )
    )
    emoji = [name for name in logprobs["tokens"] if name.startswith("bytes:")]
    assert emoji, "the tokens of an emoji are no characters"
    for name, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if not name.startswith("bytes:"):
            assert ANSWER[offset : offset + len(name)] == name


async def test_streamed_offsets_are_those_in_the_whole_text(shell: Shell) -> None:
    shell.plays(*shell.say(ANSWER, size=2))
    whole = (await shell.post_text(prompt="x", logprobs=0)).json()["choices"][0]["logprobs"]
    events = events_of((await shell.post_text(prompt="x", logprobs=0, stream=True)).text)
    offsets = [offset for choice in choices_of(events, 0)[:-1] for offset in choice["logprobs"]["text_offset"]]
    assert offsets == whole["text_offset"]


async def test_an_engine_that_gives_none_is_at_fault(shell: Shell) -> None:
    shell.plays(Raw(Chunk(0, (300,), STOPPED)))
    response = await shell.post(ASK)
    assert response.status_code == 500
    assert "log-probabilities" in error_of(response)["message"]


async def test_without_being_asked_there_are_none(shell: Shell) -> None:
    shell.plays(*shell.say("x"))
    assert (await shell.post()).json()["choices"][0]["logprobs"] is None
    assert last_request(shell).sampling.logprobs is None


def test_json_has_no_infinity() -> None:
    assert finite(float("-inf")) == LOGPROB_MIN
