"""Answers, streamed and not."""

import asyncio
import json

import pytest

from meshift.schemas.requests import FinishReason
from meshift.services.frontend.api import GenerateRequest
from tests.unit.frontend.fake_frontend import Emit, Fail, Script
from tests.unit.frontend.http.harness import (
    CREATED,
    HELLO,
    Shell,
    ended,
    error_of,
    events_of,
    last_request,
    text_of,
)

STREAM = {**HELLO, "stream": True}
ANSWER = "The capital is 😀 Paris, you 好."


def prompt_length(shell: Shell) -> int:
    return len(shell.tokenizer.apply_chat_template([{"role": "user", "content": "hello"}]))


async def test_a_whole_answer(shell: Shell) -> None:
    shell.plays(*shell.say(ANSWER, finish=ended(FinishReason.STOP, matched_stop=2, cached_tokens=3)))
    response = await shell.post()
    assert response.status_code == 200
    completion_tokens = len(shell.tokenizer.encode(ANSWER))
    assert response.json() == {
        "id": last_request(shell).request_id,
        "object": "chat.completion",
        "created": CREATED,
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": ANSWER, "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": prompt_length(shell),
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_length(shell) + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }
    assert shell.frontend.streams[0].cancels == 0


@pytest.mark.parametrize("size", [1, 3, 100])
async def test_a_streamed_answer(shell: Shell, size: int) -> None:
    shell.plays(*shell.say(ANSWER, size=size, finish=ended(FinishReason.LENGTH)))
    response = await shell.post(STREAM)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    events = events_of(response.text)
    assert events.pop() == "[DONE]"
    head = {
        "id": last_request(shell).request_id,
        "object": "chat.completion.chunk",
        "created": CREATED,
        "model": "tiny",
    }
    assert all({key: event[key] for key in head} == head and set(event) == {*head, "choices"} for event in events)
    choices = [event["choices"][0] for event in events]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert choices[-1] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    assert all(choice["finish_reason"] is None and set(choice["delta"]) == {"content"} for choice in choices[1:-1])
    assert text_of(events) == ANSWER
    assert shell.frontend.streams[0].cancels == 0


async def test_usage_comes_in_an_event_of_its_own_if_asked_for(shell: Shell) -> None:
    shell.plays(*shell.say("Paris", finish=ended(FinishReason.STOP, cached_tokens=4)))
    response = await shell.post({**STREAM, "stream_options": {"include_usage": True}})
    *events, last, done = events_of(response.text)
    assert done == "[DONE]"
    assert all(event["usage"] is None for event in events)
    assert last["choices"] == []
    completion_tokens = len(shell.tokenizer.encode("Paris"))
    assert last["usage"] == {
        "prompt_tokens": prompt_length(shell),
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_length(shell) + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


async def test_an_empty_answer(shell: Shell) -> None:
    shell.plays(Emit((2,), ended(FinishReason.STOP, matched_stop=2)))
    whole = (await shell.post()).json()
    assert whole["choices"][0]["message"]["content"] == ""
    assert whole["usage"]["completion_tokens"] == 1
    events = events_of((await shell.post(STREAM)).text)
    assert [event["choices"][0]["delta"] for event in events[:-1]] == [{"role": "assistant", "content": ""}, {}]


async def test_events_are_ascii(shell: Shell) -> None:
    """Line separators of Unicode must not look like ends of lines."""
    shell.plays(*shell.say("a\u2028b\u0085c"))
    response = await shell.post(STREAM)
    assert response.content.isascii()
    assert text_of(events_of(response.text)) == "a\u2028b\u0085c"


@pytest.mark.parametrize("streams", [False, True])
async def test_a_stop_string_that_the_engine_misses_ends_the_answer_and_the_request(
    shell: Shell, streams: bool
) -> None:
    shell.plays(*shell.say("one two three four", size=2), Fail(AssertionError("read on after the stop string")))
    response = await shell.post({**HELLO, "stream": streams, "stop": ["three"]})
    if streams:
        events = events_of(response.text)
        assert text_of(events) == "one two "
        assert events[-2]["choices"][0]["finish_reason"] == "stop"
    else:
        assert response.json()["choices"][0]["message"]["content"] == "one two "
        assert response.json()["choices"][0]["finish_reason"] == "stop"
    assert shell.frontend.streams[0].cancels == 1


async def test_request_ids_are_unique_though_a_client_repeats_its_own(shell: Shell) -> None:
    shell.plays(*shell.say("x"))
    first, second = await shell.post(x_request_id="job-7.a:b"), await shell.post(x_request_id="job-7.a:b")
    ids = [request.request_id for request in shell.frontend.requests]
    assert [response.headers["x-request-id"] for response in (first, second)] == ["job-7.a:b"] * 2
    assert len(set(ids)) == 2
    assert all(request_id.startswith("job-7.a:b-") and len(request_id) <= 128 for request_id in ids)


async def test_a_request_without_an_id_gets_one(shell: Shell) -> None:
    shell.plays(*shell.say("x"))
    response = await shell.post()
    assert response.headers["x-request-id"] == response.json()["id"] == last_request(shell).request_id
    assert response.json()["id"].startswith("chatcmpl-")


@pytest.mark.parametrize("request_id", ["", "a b", "x" * 65, "ä".encode().decode("latin-1"), "a/b"])
async def test_an_invalid_request_id_is_refused(shell: Shell, request_id: str) -> None:
    async with shell.client() as client:
        headers = [(b"x-request-id", request_id.encode("latin-1"))]
        response = await client.post("/v1/chat/completions", json=HELLO, headers=headers)
    assert response.status_code == 400
    assert error_of(response)["param"] == "X-Request-Id"
    assert not shell.frontend.requests


async def test_answers_of_concurrent_requests_are_not_mixed(shell: Shell) -> None:
    texts = {f"w{index}": f"answer number {index} of many" for index in range(20)}

    def play(request: GenerateRequest) -> Script:
        word = shell.tokenizer.decode(request.prompt).split()[1]
        return Script(shell.say(texts[word]))

    shell.frontend.play = play
    bodies = [
        {**HELLO, "messages": [{"role": "user", "content": word}], "stream": index % 2 == 0}
        for index, word in enumerate(texts)
    ]
    responses = await asyncio.gather(*(shell.post(body) for body in bodies))
    for index, (word, response) in enumerate(zip(texts, responses, strict=True)):
        whole = index % 2 and json.loads(response.text)["choices"][0]["message"]["content"]
        assert (whole or text_of(events_of(response.text))) == texts[word]
