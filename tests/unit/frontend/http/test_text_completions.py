"""`POST /v1/completions`."""

from typing import Any

import pytest

from meshift.schemas.requests import FinishReason
from meshift.services.frontend.api import GenerateRequest
from tests.unit.frontend.fake_frontend import Script
from tests.unit.frontend.http.harness import CREATED, Shell, choices_of, ended, error_of, events_of, last_request


async def test_a_whole_answer(shell: Shell) -> None:
    shell.plays(*shell.say(" Paris.", finish=ended(FinishReason.STOP, cached_tokens=3)))
    response = await shell.post_text(prompt="The capital is")
    prompt, completion = len(shell.tokenizer.encode("The capital is")), len(shell.tokenizer.encode(" Paris."))
    assert response.json() == {
        "id": last_request(shell).request_id,
        "object": "text_completion",
        "created": CREATED,
        "model": "tiny",
        "choices": [{"index": 0, "text": " Paris.", "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }
    assert last_request(shell).sampling.max_new_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("hello", ["hello"]),
        (["hello", "world"], ["hello", "world"]),
        ([300], [[300]]),
        ([[300, 301], [302]], [[300, 301], [302]]),
    ],
)
async def test_the_forms_of_a_prompt(shell: Shell, prompt: object, texts: list[Any]) -> None:
    shell.plays(*shell.say("x"))
    response = await shell.post_text(prompt=prompt)
    assert response.status_code == 200, response.text
    expected = [shell.tokenizer.encode(text) if isinstance(text, str) else text for text in texts]
    assert sorted(list(request.prompt) for request in shell.frontend.requests) == sorted(expected)
    assert response.json()["usage"]["prompt_tokens"] == sum(map(len, expected))


def says_itself(shell: Shell) -> None:
    """Each request's answer names its prompt and its seed."""

    def play(request: GenerateRequest) -> Script:
        return Script(shell.say(f"{shell.tokenizer.decode(request.prompt)} {request.sampling.seed}"))

    shell.frontend.play = play


async def test_choices_of_several_prompts_are_in_order(shell: Shell) -> None:
    says_itself(shell)
    choices = (await shell.post_text(prompt=["a", "b"], n=2, seed=5)).json()["choices"]
    assert [choice["text"] for choice in choices] == ["a 5", "a 6", "b 5", "b 6"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]


async def test_a_streamed_answer(shell: Shell) -> None:
    says_itself(shell)
    response = await shell.post_text(
        prompt=["a", "b"], seed=5, stream=True, stream_options={"include_usage": True}, max_tokens=50
    )
    *events, usage, done = events_of(response.text)
    assert done == "[DONE]"
    assert {event["object"] for event in events} == {"text_completion"}
    for index, text in enumerate(("a 5", "b 5")):
        *pieces, last = choices_of(events, index)
        assert "".join(choice["text"] for choice in pieces) == text
        assert last == {"index": index, "text": "", "logprobs": None, "finish_reason": "stop"}
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": [5, "a"]}, "prompt"),
        ({"prompt": [5, True]}, "prompt"),
        ({"prompt": [5, -1]}, "prompt"),
        ({"prompt": [2**31]}, "prompt"),
        ({"prompt": [[5], "a"]}, "prompt"),
        ({"prompt": [100_000]}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": [300] * 512}, "prompt"),
        ({"prompt": ["a"] * 65, "n": 2}, "n"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "messages": []}, "messages"),
        ({"prompt": "a", "max_completion_tokens": 5}, "max_completion_tokens"),
        ({"prompt": "a", "max_tokens": 512}, "max_tokens"),
    ],
)
async def test_bad_fields_are_named(refusing: Shell, body: dict[str, Any], param: str) -> None:
    response = await refusing.post_text(**body)
    assert response.status_code == 400, response.text
    assert error_of(response)["param"] == param
    assert not refusing.frontend.requests


async def test_long_prompts_are_tokenised_in_a_thread(shell: Shell) -> None:
    long = "hello " * 2000
    response = await shell.post_text(prompt=long)
    assert error_of(response)["code"] == "context_length_exceeded"
