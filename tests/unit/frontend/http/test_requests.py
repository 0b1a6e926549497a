"""What the core gets of a body, and which bodies are refused."""

import json
from typing import Any

import pytest

from meshift.schemas.limits import LOGIT_BIAS_MAX
from meshift.schemas.requests import Priority, Sampling
from meshift.services.frontend.http.schemas import ChatRequest
from meshift.services.frontend.text.tokenizer import ChatTokenizer
from tests.unit.frontend.fake_frontend import FakeFrontend, model_info
from tests.unit.frontend.http.harness import HELLO, MakeShell, Shell, error_of, last_request
from tests.unit.frontend.text.tiny_model import TEMPLATE, write_tiny_model


def with_message(**message: Any) -> dict[str, Any]:
    return {**HELLO, "messages": [message]}


async def prompt_of(shell: Shell, *messages: dict[str, Any]) -> str:
    """The text that the core gets for messages."""
    response = await shell.post({**HELLO, "messages": list(messages)})
    assert response.status_code == 200, response.text
    tokens = last_request(shell).prompt
    return shell.tokenizer._tokenizer.decode(list(tokens), skip_special_tokens=False)


async def test_messages_go_through_the_chat_template(shell: Shell) -> None:
    prompt = await prompt_of(
        shell,
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "name": "ann"},
        {"role": "assistant", "content": "", "refusal": None, "tool_calls": None, "annotations": []},
        {"role": "developer", "content": "go on"},
    )
    assert prompt == (
        "<|start|>system\nbe brief<|end|>\n<|start|>user ann\none two<|end|>\n<|start|>assistant\n<|end|>\n"
        "<|start|>system\ngo on<|end|>\n<|start|>assistant\n"
    )


async def test_a_template_that_knows_developers_sees_them(make: MakeShell, tmp_path: Any) -> None:
    folder = write_tiny_model(tmp_path, template=TEMPLATE + "{# developer #}")
    shell = make(frontend=FakeFrontend([model_info(path=str(folder))]))
    shell.tokenizer = ChatTokenizer.load(folder)
    shell.app.state.completions._tokenizers._loaded[folder] = shell.tokenizer
    assert (await prompt_of(shell, {"role": "developer", "content": "x"})).startswith("<|start|>developer\n")


async def test_sampling_has_the_mesh_s_defaults(shell: Shell) -> None:
    await shell.post()
    request = last_request(shell)
    assert request.sampling == Sampling(max_new_tokens=512 - len(request.prompt))
    assert request.priority == Priority()
    assert request.model == "tiny"


async def test_every_sampling_field_arrives(shell: Shell) -> None:
    fields = {
        "max_tokens": 30,
        "min_tokens": 3,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 20,
        "min_p": 0.1,
        "frequency_penalty": -1.5,
        "presence_penalty": 1,
        "repetition_penalty": 1.2,
        "stop": ["a", "b"],
        "ignore_eos": True,
        "seed": -5,
        "logit_bias": {"7": -100, "5": 1.5},
        "priority": -2,
    }
    response = await shell.post({**HELLO, **fields})
    assert response.status_code == 200, response.text
    assert last_request(shell).sampling == Sampling(
        max_new_tokens=30,
        min_new_tokens=3,
        temperature=0.0,
        top_p=0.5,
        top_k=20,
        min_p=0.1,
        frequency_penalty=-1.5,
        presence_penalty=1.0,
        repetition_penalty=1.2,
        stop=("a", "b"),
        logit_bias=((5, 1.5), (7, -100.0)),
        ignore_eos=True,
        seed=-5,
    )
    assert last_request(shell).priority == Priority(scheduling=-2, execution=-2)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"stop": "a"}, {"stop": ("a",)}),
        ({"stop": None}, {"stop": ()}),
        ({"stop": []}, {"stop": ()}),
        ({"top_k": 0}, {"top_k": -1}),
        ({"max_completion_tokens": 9}, {"max_new_tokens": 9}),
        ({"max_completion_tokens": 9, "max_tokens": 9}, {"max_new_tokens": 9}),
        ({"max_tokens": None}, {"max_new_tokens": 100}),
    ],
)
async def test_forms_of_a_field(make: MakeShell, fields: dict[str, Any], expected: dict[str, Any]) -> None:
    shell = make(output_tokens_default=100)
    response = await shell.post({**HELLO, **fields})
    assert response.status_code == 200, response.text
    values = last_request(shell).sampling.model_dump()
    assert {name: values[name] for name in expected} == expected


HARMLESS = {
    "user": "u",
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "metadata": {"a": "b"},
    "parallel_tool_calls": True,
    "n": 1,
    "store": False,
    "logprobs": False,
    "top_logprobs": 0,
    "logit_bias": {},
    "response_format": {"type": "text"},
    "tools": [],
    "tool_choice": "none",
    "functions": [],
    "function_call": "none",
    "modalities": ["text"],
    "service_tier": "auto",
    "stream_options": None,
}


async def test_fields_that_ask_for_nothing_are_accepted(shell: Shell) -> None:
    response = await shell.post({**HELLO, **HARMLESS})
    assert response.status_code == 200, response.text
    assert last_request(shell).sampling == Sampling(max_new_tokens=512 - len(last_request(shell).prompt))


async def test_null_is_every_optional_field_s_default(shell: Shell) -> None:
    optional = {name: None for name, info in ChatRequest.model_fields.items() if not info.is_required()}
    response = await shell.post({**HELLO, **optional})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    "bias",
    [
        {"5": 101},
        {"5": -100.5},
        {"5": True},
        {"-1": 1},
        {"05": 1},
        {"word": 1},
        {"999999": 1},
        {str(token): 1 for token in range(LOGIT_BIAS_MAX + 1)},
        [[5, 1]],
    ],
)
async def test_a_bias_that_no_token_can_have_is_refused(refusing: Shell, bias: object) -> None:
    response = await refusing.post({**HELLO, "logit_bias": bias})
    assert response.status_code == 400
    assert error_of(response)["param"].partition(".")[0] == "logit_bias"
    assert not refusing.frontend.requests


UNSUPPORTED = {
    "store": True,
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "modalities": ["text", "audio"],
    "audio": {"voice": "x"},
    "prediction": {"type": "content", "content": "x"},
    "reasoning_effort": "low",
    "verbosity": "low",
    "service_tier": "priority",
    "web_search_options": {},
}


@pytest.mark.parametrize("name", UNSUPPORTED)
async def test_fields_that_are_not_served_are_named(refusing: Shell, name: str) -> None:
    response = await refusing.post({**HELLO, name: UNSUPPORTED[name]})
    assert response.status_code == 400
    error = error_of(response)
    assert (error["param"], error["code"], error["type"]) == (name, "unsupported", "invalid_request_error")
    assert name in error["message"]
    assert not refusing.frontend.requests


TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ARGUMENTS = "messages.0.tool_calls.0.function.arguments"


def schema_format(schema: object) -> dict[str, Any]:
    return {**HELLO, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"not": schema}
    return schema


BAD_BODIES: list[tuple[dict[str, Any], str | None]] = [
    ({**HELLO, "temprature": 1}, "temprature"),
    ({**HELLO, "n": True}, "n"),
    ({**HELLO, "n": 1.0}, "n"),
    ({**HELLO, "n": 0}, "n"),
    ({**HELLO, "n": 129}, "n"),
    ({**HELLO, "logprobs": 2}, "logprobs"),
    ({**HELLO, "top_logprobs": 3}, "top_logprobs"),
    ({**HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({**HELLO, "response_format": {"type": "xml"}}, "response_format.type"),
    ({**HELLO, "response_format": {"type": "json_schema"}}, "response_format"),
    ({**HELLO, "response_format": {"type": "text", "json_schema": {"name": "x", "schema": {}}}}, "response_format"),
    (schema_format({"type": "strange"}), "response_format.json_schema.schema"),
    (schema_format([]), "response_format.json_schema.schema"),
    (schema_format({"description": "x" * 70_000}), "response_format.json_schema.schema"),
    (schema_format(nested(100)), "response_format.json_schema.schema"),
    ({**HELLO, "tool_choice": "required"}, "tool_choice"),
    ({**HELLO, "tool_choice": "perhaps"}, "tool_choice"),
    ({**HELLO, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({**HELLO, "tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({**HELLO, "tools": [TOOL, TOOL], "tool_choice": "required"}, "tools.1.function.name"),
    ({**HELLO, "tools": [{"type": "retrieval"}]}, "tools.0.type"),
    ({**HELLO, "tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools.0.function.name"),
    (
        {**HELLO, "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 5}}}]},
        "tools.0.function.parameters",
    ),
    (with_message(role="user", content="x", tool_calls=[CALL]), "messages.0.tool_calls"),
    (with_message(role="assistant", tool_calls=[{**CALL, "function": {"name": "f", "arguments": "["}}]), ARGUMENTS),
    (with_message(role="assistant", tool_calls=[]), "messages.0.content"),
    ({"messages": HELLO["messages"]}, "model"),
    ({**HELLO, "model": 5}, "model"),
    ({"model": "tiny"}, "messages"),
    ({**HELLO, "messages": []}, "messages"),
    ({**HELLO, "messages": "hello"}, "messages"),
    ({**HELLO, "messages": [5]}, "messages.0"),
    ({**HELLO, "messages": [*HELLO["messages"], {"role": "robot", "content": "x"}]}, "messages.1.role"),
    (with_message(role="user"), "messages.0.content"),
    (with_message(content="x"), "messages.0.role"),
    (with_message(role="user", content=None), "messages.0.content"),
    (with_message(role="user", content=5), "messages.0.content"),
    (with_message(role="user", content=[]), "messages.0.content"),
    (with_message(role="user", content=["x"]), "messages.0.content.0"),
    (with_message(role="user", content=[{"type": "text"}]), "messages.0.content.0.text"),
    (
        with_message(role="user", content=[{"type": "image_url", "image_url": {"url": "x"}}]),
        "messages.0.content.0.type",
    ),
    (with_message(role="user", content="x", weight=1), "messages.0.weight"),
    (with_message(role="assistant", content="x", tool_calls=[{"id": "1"}]), "messages.0.tool_calls.0.function"),
    (with_message(role="user", content="x", name=5), "messages.0.name"),
    ({**HELLO, "stream": "yes"}, "stream"),
    ({**HELLO, "stream_options": {"include_usage": True}}, "stream_options"),
    ({**HELLO, "stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({**HELLO, "stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({**HELLO, "stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({**HELLO, "max_tokens": 0}, "max_tokens"),
    ({**HELLO, "max_tokens": -1}, "max_tokens"),
    ({**HELLO, "max_tokens": True}, "max_tokens"),
    ({**HELLO, "max_tokens": "5"}, "max_tokens"),
    ({**HELLO, "max_tokens": 2**40}, "max_tokens"),
    ({**HELLO, "max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({**HELLO, "max_completion_tokens": 1.5}, "max_completion_tokens"),
    ({**HELLO, "min_tokens": -1}, "min_tokens"),
    ({**HELLO, "min_tokens": 6, "max_tokens": 5}, "min_tokens"),
    ({**HELLO, "temperature": 2.1}, "temperature"),
    ({**HELLO, "temperature": -0.1}, "temperature"),
    ({**HELLO, "temperature": "1"}, "temperature"),
    ({**HELLO, "top_p": 0}, "top_p"),
    ({**HELLO, "top_p": 1.1}, "top_p"),
    ({**HELLO, "top_k": -2}, "top_k"),
    ({**HELLO, "min_p": 1.1}, "min_p"),
    ({**HELLO, "frequency_penalty": 3}, "frequency_penalty"),
    ({**HELLO, "presence_penalty": -3}, "presence_penalty"),
    ({**HELLO, "repetition_penalty": 0}, "repetition_penalty"),
    ({**HELLO, "stop": 5}, "stop"),
    ({**HELLO, "stop": [5]}, "stop.0"),
    ({**HELLO, "stop": ["a", ""]}, "stop.1"),
    ({**HELLO, "stop": "x" * 257}, "stop.0"),
    ({**HELLO, "stop": ["x"] * 17}, "stop"),
    ({**HELLO, "seed": 2**63}, "seed"),
    ({**HELLO, "ignore_eos": 1}, "ignore_eos"),
    ({**HELLO, "priority": 1.5}, "priority"),
    ({**HELLO, "priority": 2**31}, "priority"),
    ({**HELLO, "metadata": {"a": 1}}, "metadata.a"),
    ({**HELLO, "metadata": {f"k{index}": "v" for index in range(17)}}, "metadata"),
    ({**HELLO, "metadata": {f"k{index}": 0 for index in range(20_000)}}, "metadata"),
    ({**HELLO, "messages": [{"role": "user", "content": "x"}] * 4097}, "messages"),
    (with_message(role="user", content=[{"type": "text", "text": "x"}] * 257), "messages.0.content"),
    ({f"x{index}": 0 for index in range(200)}, None),
    (with_message(**{f"x{index}": 0 for index in range(200)}), "messages.0"),
]


@pytest.mark.parametrize(("body", "param"), BAD_BODIES)
async def test_bad_fields_are_named(refusing: Shell, body: dict[str, Any], param: str | None) -> None:
    response = await refusing.post(body)
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert error["code"] in ("invalid_request", "unsupported")
    assert not refusing.frontend.requests


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
async def test_numbers_must_be_finite(refusing: Shell, value: str) -> None:
    body = json.dumps({**HELLO, "temperature": 12345}).replace("12345", value)
    async with refusing.client() as client:
        response = await client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert error_of(response)["param"] == "temperature"


async def test_an_enormous_field_name_does_not_come_back_whole(shell: Shell) -> None:
    response = await shell.post({**HELLO, "x" * 100_000: 1})
    assert response.status_code == 400
    assert len(response.content) < 1000


async def test_an_unknown_model_is_not_found(shell: Shell) -> None:
    response = await shell.post({**HELLO, "model": "gpt-5"})
    assert response.status_code == 404
    error = error_of(response)
    assert (error["param"], error["code"], error["type"]) == ("model", "model_not_found", "invalid_request_error")
    assert "gpt-5" in error["message"]


async def test_before_any_instance_lives_a_model_is_unavailable_and_not_unknown(make: MakeShell) -> None:
    response = await make(frontend=FakeFrontend([])).post()
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"


async def test_a_prompt_that_fills_the_context_is_too_long(make: MakeShell) -> None:
    length = len(make().tokenizer.apply_chat_template([{"role": "user", "content": "hello"}]))
    shell = make(frontend=FakeFrontend([model_info(path="/m", context_tokens_max=length)]))
    response = await shell.post()
    assert response.status_code == 400
    error = error_of(response)
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


async def test_what_is_left_of_the_context_is_the_limit(make: MakeShell) -> None:
    length = len(make().tokenizer.apply_chat_template([{"role": "user", "content": "hello"}]))
    shell = make(frontend=FakeFrontend([model_info(path="/m", context_tokens_max=length + 5)]))
    assert (await shell.post()).status_code == 200
    assert last_request(shell).sampling.max_new_tokens == 5
    assert (await shell.post({**HELLO, "max_tokens": 5})).status_code == 200
    for name in ("max_tokens", "max_completion_tokens"):
        error = error_of(await shell.post({**HELLO, name: 6}))
        assert (error["param"], error["code"]) == (name, "context_length_exceeded")


async def test_a_template_s_refusal_reaches_the_client(shell: Shell) -> None:
    response = await shell.post(with_message(role="tool", content="x", tool_call_id="1"))
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == "messages"
    assert "tool messages are not supported" in error["message"]


async def test_tokens_that_the_model_lacks_are_refused(make: MakeShell) -> None:
    shell = make(frontend=FakeFrontend([model_info(path="/m", vocabulary_size=100)]))
    error = error_of(await shell.post())
    assert error["param"] == "messages"
    assert "but the model has 100" in error["message"]


@pytest.mark.parametrize("inline_chars_max", [0, 10**6])
async def test_long_prompts_give_the_same_tokens_in_a_thread(make: MakeShell, inline_chars_max: int) -> None:
    shell = make(
        inline_chars_max=inline_chars_max, frontend=FakeFrontend([model_info(path="/m", context_tokens_max=10**6)])
    )
    content = "hello world 😀 " * 4000  # beyond what is parsed on the event loop, too
    response = await shell.post(with_message(role="user", content=content))
    assert response.status_code == 200
    assert last_request(shell).prompt == shell.tokenizer.apply_chat_template([{"role": "user", "content": content}])
