"""Tools that a client offers, and the calls of a conversation so far."""

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from meshift.services.frontend.http.schemas.base import Strict
from meshift.services.frontend.http.schemas.structure import JsonSchema, Name

TOOLS_MAX = 128
TOOL_CALLS_MAX = 128
"""Tools of a request, as at OpenAI, and calls of a message."""


class Function(Strict):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: JsonSchema | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool; there are functions only."""

    type: Literal["function"]
    function: Function


def _json_object(text: str) -> str:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise PydanticCustomError("arguments", "must be a JSON object, as a string")
    return text


class AskedFunction(Strict):
    """A call's function and arguments."""

    name: str
    arguments: Annotated[str, AfterValidator(_json_object)]

    def parsed(self) -> dict[str, Any]:
        """The arguments, which chat templates want as an object."""
        return dict(json.loads(self.arguments))


class AskedCall(Strict):
    """A call that an assistant's message has made."""

    id: str
    type: Literal["function"] = "function"
    function: AskedFunction
    index: int | None = None


class _NamedFunction(Strict):
    name: str


class ToolChoice(Strict):
    """Which tool is called: `none`, `auto`, `required` (at least one, any), or the one that is named."""

    mode: Literal["none", "auto", "required", "named"]
    name: str = ""


class _NamedTool(Strict):
    type: Literal["function"]
    function: _NamedFunction


_NAMED_TOOL = TypeAdapter(_NamedTool)
_MODES = ("none", "auto", "required")


class _Choice:
    """Annotation: OpenAI's two forms of a choice become one."""

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(_choice, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        function = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
        properties = {"type": {"const": "function"}, "function": {**function, "additionalProperties": False}}
        named = {"type": "object", "properties": properties, "required": ["type", "function"]}
        return {"anyOf": [{"enum": list(_MODES)}, {**named, "additionalProperties": False}]}


def _choice(value: object) -> object:
    if isinstance(value, str) and value in _MODES:
        return ToolChoice.model_validate({"mode": value})
    if not isinstance(value, dict):
        raise PydanticCustomError("tool_choice", "must be none, auto, required or a named function")
    return ToolChoice(mode="named", name=_NAMED_TOOL.validate_python(value).function.name)


ToolChoiceField = Annotated[ToolChoice, _Choice()]
