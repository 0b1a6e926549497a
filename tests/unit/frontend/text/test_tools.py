"""Tool calls in a model's text."""

import json

import pytest
from jsonschema import Draft202012Validator

from meshift.services.frontend.text.tools import (
    FORCED,
    FORMATS,
    Call,
    ConflictingDefinitions,
    ToolText,
    detect_format,
    forced_schema,
)

NAMES = frozenset({"f", "g"})
F = Call("f", '{"a": 1}')
G = Call("g", "{}")


def read(name: str, text: str, size: int, calls_max: int | None = None) -> tuple[str, str, list[Call]]:
    """The text that went through before the end, at the end, and the calls."""
    form = FORCED if name == "forced" else FORMATS[name]
    tools = ToolText(form, NAMES, calls_max=calls_max)
    before = "".join(tools.push(text[start : start + size]) for start in range(0, len(text), size))
    end = tools.end()
    return before, end.text, list(end.calls)


CASES = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [F]),
    ("hermes", 'Let me see. <tool_call>{"name": "g"}</tool_call>\n', "Let me see. ", [G]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call><tool_call>{"name": "g"}</tool_call>', "",
     [F, G]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', "", [F]),
    ("llama3", '{"name": "f", "parameters": {"a": 1}}', "", [F]),
    ("llama3", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', "", [F, G]),
    ("llama3", ' \n{"name": "g", "parameters": {}}', "", [G]),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]', "", [F, G]),
    ("mistral", 'Yes.[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{}', "Yes.", [F, G]),
    ("forced", '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]', "", [F, G]),
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("name", "text", "visible", "calls"), CASES)
def test_calls_are_found(name: str, text: str, visible: str, calls: list[Call], size: int) -> None:
    assert read(name, text, size) == (visible, "", calls)
    assert read(name, text, size, calls_max=1) == (visible, "", calls[:1])


TEXTS = [
    ("hermes", "Just <b>text</b> with 1 < 2 <tool"),
    ("hermes", "<tool_call>{broken</tool_call>"),
    ("hermes", '<tool_call>{"name": "h"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f"}</tool_call> and more'),
    ("hermes", "<tool_call>" + "[" * 10_000),
    ("llama3", "An object: {} is no call"),
    ("llama3", '{"city": "Paris"}'),
    ("llama3", "<|python"),
    ("mistral", "[TOOL_CALLS] nothing"),
    ("mistral", "[TOOL"),
    ("forced", '[{"name": "f", "para'),
    ("forced", "[]"),
    ("forced", '[{"name": "f", "parameters": 5}]'),
]


@pytest.mark.parametrize("size", [1, 3, 100_000])
@pytest.mark.parametrize(("name", "text"), TEXTS)
def test_what_is_no_call_is_text(name: str, text: str, size: int) -> None:
    before, rest, calls = read(name, text, size)
    assert before + rest == text
    assert calls == []


def test_text_goes_through_before_the_end() -> None:
    assert read("hermes", "Just 1 < 2, more", 1)[0] == "Just 1 < 2, more"
    assert read("llama3", "Just {}", 1)[0] == "Just {}"


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("{% if tools %}<tool_call><function=x>{% endif %}", None),
        ("{{ tools }} <|python_tag|>", "llama3"),
        ("{{ tools }} [TOOL_CALLS]", "mistral"),
        ("{{ tools }}", None),
        ("<tool_call>", None),
        ("", None),
    ],
)
def test_formats_are_detected(template: str, name: str | None) -> None:
    form = detect_format(template)
    assert (form and form.name) == name


PARAMETERS = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/number"}},
    "$defs": {"number": {"type": "integer"}},
}


def test_a_forced_schema_allows_calls_only() -> None:
    schema = json.loads(forced_schema([("f", PARAMETERS), ("g", None)], calls_max=None))
    Draft202012Validator.check_schema(schema)
    valid = Draft202012Validator(schema).is_valid
    assert valid([{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}])
    assert not valid([])
    assert not valid([{"name": "f", "parameters": {"a": "x"}}])
    assert not valid([{"name": "h", "parameters": {}}])
    assert not valid([{"name": "g"}])


def test_a_forced_schema_may_allow_one_call_only() -> None:
    schema = json.loads(forced_schema([("g", None)], calls_max=1))
    valid = Draft202012Validator(schema).is_valid
    assert valid([{"name": "g", "parameters": {}}])
    assert not valid([{"name": "g", "parameters": {}}] * 2)


def test_definitions_may_not_contradict() -> None:
    forced_schema([("f", PARAMETERS), ("g", PARAMETERS)], calls_max=None)
    other = {**PARAMETERS, "$defs": {"number": {"type": "string"}}}
    with pytest.raises(ConflictingDefinitions, match="number"):
        forced_schema([("f", PARAMETERS), ("g", other)], calls_max=None)
