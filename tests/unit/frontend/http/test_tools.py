"""Tools: what the template and the core get, and calls in answers."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshift.services.frontend.text.tokenizer import ChatTokenizer
from tests.unit.frontend.fake_frontend import FakeFrontend, model_info
from tests.unit.frontend.http.harness import (
    HELLO,
    MakeShell,
    Shell,
    choices_of,
    error_of,
    events_of,
    last_request,
    make_shell,
)
from tests.unit.frontend.text.tiny_model import TEMPLATE, write_tiny_model

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "strict": True,
    },
}
OTHER = {"type": "function", "function": {"name": "clock"}}
ASK: dict[str, Any] = {**HELLO, "tools": [TOOL, OTHER]}
NAMED = {"type": "function", "function": {"name": "weather"}}
TOOL_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{# <tool_call> #}"
    + TEMPLATE.replace("'tool'", "'never'").replace(
        "{{ '\\n' + message.content }}",
        "{{ '\\n' + message.content }}{% for call in message.tool_calls or [] %}"
        "{{ call.function.name }}={{ call.function.arguments.city }}{% endfor %}",
    )
)  # fmt: skip
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'


@pytest.fixture
def tooled(tmp_path: Path) -> Shell:
    """A model whose template knows tools, and Hermes' calls."""
    folder = write_tiny_model(tmp_path / "tooled", template=TOOL_TEMPLATE)
    tokenizer = ChatTokenizer.load(folder)
    return make_shell(folder, tokenizer, frontend=FakeFrontend([model_info(path=str(folder), context_tokens_max=4096)]))


async def test_the_template_gets_the_tools_and_the_answer_its_calls(tooled: Shell) -> None:
    tooled.plays(*tooled.say(f"I look. {CALL}", size=2))
    response = await tooled.post(ASK)
    prompt = tooled.tokenizer.decode(last_request(tooled).prompt)
    tools = json.loads(prompt.partition("\n")[0].partition("]user")[0].removesuffix("user").rstrip("]") + "]")
    assert [tool["function"]["name"] for tool in tools] == ["weather", "clock"]
    assert "strict" not in tools[0]["function"]
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I look."
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert len(call["id"]) == 9
    assert last_request(tooled).sampling.json_schema is None


async def test_calls_in_a_stream(tooled: Shell) -> None:
    tooled.plays(*tooled.say(f"I look. {CALL}\n{CALL}", size=3))
    events = events_of((await tooled.post({**ASK, "stream": True})).text)
    _, *pieces, calls, last = choices_of(events, 0)
    assert "".join(choice["delta"]["content"] for choice in pieces) == "I look. "
    assert [call["index"] for call in calls["delta"]["tool_calls"]] == [0, 1]
    assert len({call["id"] for call in calls["delta"]["tool_calls"]}) == 2
    assert last["finish_reason"] == "tool_calls"


async def test_one_call_only_if_so_asked(tooled: Shell) -> None:
    tooled.plays(*tooled.say(CALL + CALL))
    response = await tooled.post({**ASK, "parallel_tool_calls": False})
    message = response.json()["choices"][0]["message"]
    assert len(message["tool_calls"]) == 1
    assert message["content"] is None


async def test_text_is_an_answer_too(tooled: Shell) -> None:
    tooled.plays(*tooled.say("It is <tool", size=1))
    choice = (await tooled.post(ASK)).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"] == {"role": "assistant", "content": "It is <tool", "refusal": None}


async def test_a_conversation_with_calls_goes_through_the_template(tooled: Shell) -> None:
    call = {"id": "123456789", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sun", "tool_call_id": "123456789"},
    ]
    response = await tooled.post({**HELLO, "messages": messages})
    assert response.status_code == 200, response.text
    assert "weather=Rome" in tooled.tokenizer.decode(last_request(tooled).prompt)


@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_a_forced_call_is_a_schema(shell: Shell, choice: object) -> None:
    """Without a template that knows tools, too."""
    shell.plays(*shell.say('[{"name": "weather", "parameters": {"city": "Paris"}}]'))
    response = await shell.post({**ASK, "tool_choice": choice})
    assert response.status_code == 200, response.text
    schema = json.loads(last_request(shell).sampling.json_schema or "")
    assert ("maxItems" in schema) == (choice == NAMED)
    assert "weather" in json.dumps(schema)
    assert ("clock" in json.dumps(schema)) == (choice == "required")
    answer = response.json()["choices"][0]
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"]["tool_calls"][0]["function"]["name"] == "weather"


async def test_tools_that_may_not_be_called_are_not_mentioned(tooled: Shell) -> None:
    tooled.plays(*tooled.say(CALL))
    choice = (await tooled.post({**ASK, "tool_choice": "none"})).json()["choices"][0]
    assert "weather" not in tooled.tokenizer.decode(last_request(tooled).prompt)
    assert choice["message"]["content"] == CALL
    assert "tool_calls" not in choice["message"]


async def test_what_can_not_be_done_names_the_field(shell: Shell, make: MakeShell, tooled: Shell) -> None:
    for refuser in (shell, make(tool_parser="none")):
        error = error_of(await refuser.post(ASK))
        assert (error["param"], error["code"]) == ("tools", "unsupported")
    schema = {"type": "json_object"}
    assert error_of(await tooled.post({**ASK, "response_format": schema}))["param"] == "response_format"
    definitions = [
        {"type": "function", "function": {"name": name, "parameters": {"$defs": {"x": {"type": kind}}}}}
        for name, kind in (("f", "string"), ("g", "integer"))
    ]
    error = error_of(await tooled.post({**HELLO, "tools": definitions, "tool_choice": "required"}))
    assert error["param"] == "tools"


async def test_the_operator_may_name_the_format(make: MakeShell) -> None:
    shell = make(tool_parser="mistral")
    shell.plays(*shell.say('[TOOL_CALLS][{"name": "clock", "arguments": {}}]'))
    choice = (await shell.post(ASK)).json()["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "clock", "arguments": "{}"}
