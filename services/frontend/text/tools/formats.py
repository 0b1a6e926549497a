"""The common ways to write tool calls as text."""

import json
import re
from collections.abc import Sequence

from meshift.services.frontend.text.tools.base import Call, find_marker, to_call


class Hermes:
    """Hermes, Qwen 2.5 and 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one after another."""

    name = "hermes"
    shown = frozenset({"<tool_call>", "</tool_call>"})
    _CALL = re.compile(r"\s*<tool_call>(.*?)(?:</tool_call>|\Z)\s*", re.DOTALL)

    def find(self, text: str, *, first: bool) -> tuple[int, bool]:
        return find_marker(text, "<tool_call>")

    def parse(self, text: str) -> Sequence[Call]:
        calls, place = [], 0
        while place < len(text):
            match = self._CALL.match(text, place)
            if match is None:
                raise ValueError("something else than calls")
            calls.append(to_call(json.loads(match[1]), "arguments", "parameters"))
            place = match.end()
        return calls


class Llama3:
    """Llama 3.1 to 3.3: an answer that is `{"name": ..., "parameters": {...}}`, several separated by `;`, perhaps
    behind `<|python_tag|>`."""

    name = "llama3"
    shown = frozenset({"<|python_tag|>"})
    _TAG = "<|python_tag|>"

    def find(self, text: str, *, first: bool) -> tuple[int, bool]:
        if not first:  # a JSON object behind other text is part of the answer; the tag never is
            return find_marker(text, self._TAG)
        stripped = text.lstrip()
        if not stripped:
            return 0, False
        if stripped.startswith("{") or stripped.startswith(self._TAG):
            return 0, True
        return (0, False) if self._TAG.startswith(stripped) else find_marker(text, self._TAG)

    def parse(self, text: str) -> Sequence[Call]:
        decoder, rest, calls = json.JSONDecoder(), text.strip().removeprefix(self._TAG).strip(), []
        while rest:
            value, end = decoder.raw_decode(rest)
            calls.append(to_call(value, "parameters", "arguments"))
            rest = rest[end:].strip().removeprefix(";").removeprefix(self._TAG).strip()
        return calls


class Mistral:
    """Mistral: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` repeated."""

    name = "mistral"
    shown = frozenset({"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"})
    _MARKER = "[TOOL_CALLS]"

    def find(self, text: str, *, first: bool) -> tuple[int, bool]:
        return find_marker(text, self._MARKER)

    def parse(self, text: str) -> Sequence[Call]:
        calls: list[Call] = []
        for part in text.split(self._MARKER)[1:]:
            calls += self._parse_part(part.strip())
        return calls

    def _parse_part(self, part: str) -> list[Call]:
        if "[ARGS]" in part:
            head, _, arguments = part.partition("[ARGS]")
            name = head.partition("[CALL_ID]")[0].strip()
            return [to_call({"name": name, "arguments": json.loads(arguments)}, "arguments")]
        value = json.loads(part)
        return [to_call(item, "arguments") for item in (value if isinstance(value, list) else [value])]


class Forced:
    """What `forced_schema` makes a model write: `[{"name": ..., "parameters": {...}}, ...]`."""

    name = "forced"
    shown: frozenset[str] = frozenset()

    def find(self, text: str, *, first: bool) -> tuple[int, bool]:
        return 0, True

    def parse(self, text: str) -> Sequence[Call]:
        return [to_call(item, "parameters") for item in json.loads(text)]
