"""What compiled schemas allow, character by character."""

import json
from typing import Any

import pytest

xgrammar = pytest.importorskip("xgrammar")

from meshift.backends.sglang.plugin.compiler import JsonCompiler  # noqa: E402


@pytest.fixture(scope="module")
def compiler() -> JsonCompiler:
    vocabulary = [*(bytes([byte]) for byte in range(256)), b"</s>"]
    return JsonCompiler(xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[256]), max_threads=1)


def allows(compiler: JsonCompiler, schema: Any, text: str) -> bool:
    compiled = compiler.compile_json_schema(json.dumps(schema), any_whitespace=True, max_whitespace_cnt=16)
    matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)
    return bool(matcher.accept_string(text) and matcher.is_terminated())


@pytest.mark.parametrize("bounds", [{}, {"maxLength": 5}, {"minLength": 1}, {"minLength": 1, "maxLength": 500}])
def test_no_control_character_is_in_a_string(compiler: JsonCompiler, bounds: dict[str, int]) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", **bounds}}, "required": ["a"]}
    for code in range(32):
        assert not allows(compiler, schema, f'{{"a":"{chr(code)}"}}'), code
    for text in ("x", " ", "/", "\x7f", "ä", "日", "😀", "a b!~"):
        assert allows(compiler, schema, f'{{"a":"{text}"}}'), text


@pytest.mark.parametrize("limit", [2, 130, 1000])
def test_lengths_stay_bounded(compiler: JsonCompiler, limit: int) -> None:
    schema = {"type": "string", "minLength": 2, "maxLength": limit}
    assert [allows(compiler, schema, f'"{"ä" * size}"') for size in (1, 2, limit, limit + 1)] == [
        False,
        True,
        True,
        False,
    ]


def test_values_that_look_like_a_grammar_stay(compiler: JsonCompiler) -> None:
    value = '[^"\\\r\n]'
    schema = {"type": "array", "prefixItems": [{"const": value}, {"type": "string", "maxLength": 3}], "items": False}
    assert allows(compiler, schema, json.dumps([value, "ab"]))
    assert not allows(compiler, schema, json.dumps([value])[:-1] + ',"a\tb"]')
