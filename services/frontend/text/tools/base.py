"""Tool calls in a model's text."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool; `arguments` is a JSON object, as text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolEnd:
    """What is known once the text is complete."""

    text: str
    """Text that was held back and is no call."""
    calls: Sequence[Call]


class ToolFormat(Protocol):
    """How a model writes its calls."""

    name: str
    shown: frozenset[str]
    """Special tokens that the format needs to see."""

    def find(self, text: str, *, first: bool) -> tuple[int, bool]:
        """Where calls begin in a text, or may begin if more of it follows, and whether they do. `(len(text), False)`:
        nowhere. `first`: no text came before."""

    def parse(self, text: str) -> Sequence[Call]:
        """The calls in a text that begins with them. Raises ValueError if it isn't in this format."""


class ToolText:
    """Separates one output's text from its calls. Text goes through at once; calls are known at the end."""

    def __init__(self, form: ToolFormat, names: frozenset[str], *, calls_max: int | None = None) -> None:
        """`names`: the tools there are; a call of another one is text. Further calls than `calls_max` are dropped."""
        self._form = form
        self._names = names
        self._calls_max = calls_max
        self._held = ""
        self._first = True
        self._inside = False

    def push(self, text: str) -> str:
        """What is certain not to belong to a call."""
        self._held += text
        if self._inside:
            return ""
        begin, self._inside = self._form.find(self._held, first=self._first)
        visible, self._held = self._held[:begin], self._held[begin:]
        self._first = self._first and not visible
        return visible

    def end(self) -> ToolEnd:
        """No text follows."""
        held, self._held = self._held, ""
        if not self._inside:
            return ToolEnd(held, ())
        try:
            calls = self._form.parse(held)
        except (ValueError, RecursionError):
            return ToolEnd(held, ())
        if not calls or not all(call.name in self._names for call in calls):
            return ToolEnd(held, ())
        return ToolEnd("", calls[: self._calls_max])


def find_marker(text: str, marker: str) -> tuple[int, bool]:
    """`ToolFormat.find` for calls that begin with a marker."""
    begin = text.find(marker)
    if begin >= 0:
        return begin, True
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return len(text) - length, False
    return len(text), False


def to_call(value: object, *keys: str) -> Call:
    """A call of `{"name": ..., key: {...}}`, for the first of `keys` that is there. Raises ValueError."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("a call has a name")
    arguments: Any = next((value[key] for key in keys if key in value), {})
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("arguments are an object")
    return Call(value["name"], json.dumps(arguments, ensure_ascii=False))
