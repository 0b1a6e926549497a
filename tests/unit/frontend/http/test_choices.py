"""Several answers to one request."""

import asyncio
import json

import pytest

from meshift.schemas.errors import Unavailable
from meshift.schemas.requests import FinishReason
from meshift.services.frontend.api import GenerateRequest
from tests.unit.frontend.fake_frontend import Emit, Fail, Script, Wait
from tests.unit.frontend.http.harness import HELLO, WAIT_S, Connection, Shell, choices_of, ended, error_of, events_of

TEXTS = ("Paris.", "It is Paris, the capital of France.", "Paris is big.")


def index_of(request: GenerateRequest) -> int:
    return int(request.request_id.rpartition("-")[2])


def each_says(shell: Shell, size: int = 1) -> None:
    """Choice i says TEXTS[i]; 2 tokens of the prompt were cached."""
    finish = ended(FinishReason.STOP, cached_tokens=2)
    shell.frontend.play = lambda request: Script(shell.say(TEXTS[index_of(request)], size=size, finish=finish))


async def test_each_choice_is_a_request_with_its_own_seed(shell: Shell) -> None:
    each_says(shell)
    response = await shell.post({**HELLO, "n": 3, "seed": 40})
    body = response.json()
    assert [choice["message"]["content"] for choice in body["choices"]] == list(TEXTS)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    requests = sorted(shell.frontend.requests, key=index_of)
    assert [request.sampling.seed for request in requests] == [40, 41, 42]
    assert [request.request_id for request in requests] == [f"{body['id']}-{index}" for index in range(3)]
    prompt = len(requests[0].prompt)
    completion = sum(len(shell.tokenizer.encode(text)) for text in TEXTS)
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


async def test_seeds_wrap_where_integers_end(shell: Shell) -> None:
    await shell.post({**HELLO, "n": 2, "seed": 2**63 - 1})
    assert {request.sampling.seed for request in shell.frontend.requests} == {2**63 - 1, -(2**63)}


async def test_without_a_seed_no_choice_has_one(shell: Shell) -> None:
    await shell.post({**HELLO, "n": 2})
    assert [request.sampling.seed for request in shell.frontend.requests] == [None, None]


@pytest.mark.parametrize("size", [1, 4])
async def test_streamed_choices_interleave(shell: Shell, size: int) -> None:
    each_says(shell, size)
    response = await shell.post({**HELLO, "n": 3, "stream": True, "stream_options": {"include_usage": True}})
    *events, usage, done = events_of(response.text)
    assert done == "[DONE]"
    for index, text in enumerate(TEXTS):
        first, *rest, last = choices_of(events, index)
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"]["content"] for choice in rest) == text
        assert last["finish_reason"] == "stop"
    order = [event["choices"][0]["index"] for event in events]
    assert order[:3] == [0, 1, 2]
    assert order.index(2, 3) < len(order) - 1 - order[::-1].index(1), "they go on side by side"
    assert usage["usage"]["completion_tokens"] == sum(len(shell.tokenizer.encode(text)) for text in TEXTS)


@pytest.mark.parametrize("streams", [False, True])
async def test_a_client_that_leaves_cancels_all(shell: Shell, streams: bool) -> None:
    shell.plays(*shell.say("Paris is big")[:2], Wait(asyncio.Event()))
    body = json.dumps({**HELLO, "n": 3, "stream": streams}).encode()
    connection = Connection(shell.app, body=body)
    call = asyncio.ensure_future(connection.run())
    await shell.seen(streams=3)
    connection.gone.set()
    await asyncio.wait_for(call, WAIT_S)
    assert [stream.cancels for stream in shell.frontend.streams] == [1, 1, 1]
    assert shell.app.state.completions.running == 0


async def test_any_moment_is_a_good_one_to_leave(shell: Shell) -> None:
    for moment in range(60):
        shell.plays(*shell.say("Paris is"), delay=moment % 7)
        body = json.dumps({**HELLO, "n": 3, "stream": moment % 2 == 0}).encode()
        connection = Connection(shell.app, body=body)
        call = asyncio.ensure_future(connection.run())
        for _ in range(moment):
            await asyncio.sleep(0)
        connection.gone.set()
        await asyncio.wait_for(call, WAIT_S)
    for stream in shell.frontend.streams:
        assert stream.cancels == 1 or stream.emitted == len(shell.tokenizer.encode("Paris is"))
    assert shell.app.state.completions.running == 0


async def test_if_one_is_refused_all_are(shell: Shell) -> None:
    def play(request: GenerateRequest) -> Script:
        refuse = Unavailable("no room") if index_of(request) == 1 else None
        return Script([Wait(asyncio.Event())], refuse=refuse)

    shell.frontend.play = play
    response = await shell.post({**HELLO, "n": 3})
    assert response.status_code == 503
    assert error_of(response)["message"] == "no room"
    assert [stream.cancels for stream in shell.frontend.streams] == [1, 1]


async def test_if_one_fails_the_others_are_cancelled(shell: Shell) -> None:
    def play(request: GenerateRequest) -> Script:
        return Script([Fail(Unavailable("lost")) if index_of(request) == 1 else Wait(asyncio.Event())])

    shell.frontend.play = play
    response = await shell.post({**HELLO, "n": 3, "stream": True})
    assert events_of(response.text)[-1]["error"]["message"] == "lost"
    assert all(stream.cancels == 1 for stream in shell.frontend.streams)


async def test_a_choice_that_ends_at_a_stop_string_does_not_go_on_with_the_others(shell: Shell) -> None:
    go = asyncio.Event()

    def play(request: GenerateRequest) -> Script:
        text = shell.say("one two three four")
        return Script([*text[:-1], Fail(AssertionError("read on"))] if index_of(request) == 0 else [Wait(go), *text])

    shell.frontend.play = play
    call = asyncio.ensure_future(shell.post({**HELLO, "n": 2, "stop": ["two"]}))
    await shell.seen(streams=2)
    first = next(stream for stream in shell.frontend.streams if index_of(stream.request) == 0)
    await asyncio.wait_for(first.cancelled.wait(), WAIT_S)
    assert not call.done()
    go.set()
    choices = (await call).json()["choices"]
    assert [choice["message"]["content"] for choice in choices] == ["one ", "one "]
    assert first.cancels == 1


async def test_empty_answers(shell: Shell) -> None:
    shell.plays(Emit((2,), ended(FinishReason.STOP, matched_stop=2)))
    choices = (await shell.post({**HELLO, "n": 2})).json()["choices"]
    assert [choice["message"]["content"] for choice in choices] == ["", ""]
