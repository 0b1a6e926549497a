"""What a chat request means for the template, the output and its reading."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshift.schemas.errors import InvalidRequest, Unsupported
from meshift.services.frontend.http.schemas import ChatMessage, ChatRequest
from meshift.services.frontend.http.schemas.tools import AskedCall, Tool, ToolChoice
from meshift.services.frontend.http.settings import ToolParserName
from meshift.services.frontend.text.tokenizer import ChatTokenizer
from meshift.services.frontend.text.tools import (
    FORCED,
    FORMATS,
    ConflictingDefinitions,
    ToolFormat,
    detect_format,
    forced_schema,
)


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """A chat, ready for the template; and how to read what comes out."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    """For the template."""
    json_schema: str | None = None
    """That the output obeys."""
    form: ToolFormat | None = None
    """How tool calls are written in the output; None if there can be none."""
    names: frozenset[str] = frozenset()
    calls_max: int | None = None

    @property
    def shown(self) -> frozenset[str]:
        """Special tokens that are needed as text."""
        return frozenset() if self.form is None else self.form.shown

    @property
    def chars(self) -> int:
        """About how long the prompt is."""
        return sum(len(str(value)) for part in (*self.messages, *self.tools) for value in part.values())


def plan_chat(chat: ChatRequest, tokenizer: ChatTokenizer, tool_parser: ToolParserName) -> ChatPlan:
    """Raises `InvalidRequest` or `Unsupported`, naming the field."""
    messages = [_template_message(message, tokenizer.knows_developer) for message in chat.messages]
    schema = None if chat.response_format is None else chat.response_format.schema_text()
    choice = chat.tool_choice or ToolChoice(mode="auto")
    if not chat.tools or choice.mode == "none":
        return ChatPlan(messages, json_schema=schema)
    if schema is not None:
        message = "response_format: an output that obeys a schema can't call tools; set tool_choice to none"
        raise InvalidRequest(message, param="response_format")
    _check_distinct(chat.tools)
    calls_max = 1 if chat.parallel_tool_calls is False else None
    if choice.mode == "auto":
        form: ToolFormat = _auto_form(tokenizer, tool_parser)
    else:
        form, calls_max = FORCED, 1 if choice.mode == "named" else calls_max
        schema = _forced(chat.tools, choice, calls_max)
    return ChatPlan(
        messages,
        tools=[tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in chat.tools],
        json_schema=schema,
        form=form,
        names=frozenset(tool.function.name for tool in chat.tools),
        calls_max=calls_max,
    )


def _auto_form(tokenizer: ChatTokenizer, tool_parser: ToolParserName) -> ToolFormat:
    if tool_parser == "none":
        raise Unsupported("tools: this server reads no tool calls, except forced ones (tool_choice)", param="tools")
    form = detect_format(tokenizer.template) if tool_parser == "auto" else FORMATS[tool_parser]
    if form is None:
        message = "tools: this model's chat template has no known form of tool calls; tool_choice can force one"
        raise Unsupported(message, param="tools")
    return form


def _forced(tools: Sequence[Tool], choice: ToolChoice, calls_max: int | None) -> str:
    functions = [tool.function for tool in tools if choice.mode != "named" or tool.function.name == choice.name]
    try:
        return forced_schema([(item.name, item.parameters) for item in functions], calls_max=calls_max)
    except ConflictingDefinitions as error:
        raise InvalidRequest(f"tools: {error}", param="tools") from error


def _check_distinct(tools: Sequence[Tool]) -> None:
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.function.name in seen:
            param = f"tools.{index}.function.name"
            raise InvalidRequest(f"{param}: another tool has that name", param=param)
        seen.add(tool.function.name)


def _template_message(message: ChatMessage, keep_developer: bool) -> Mapping[str, Any]:
    """What the chat template reads. `developer` is OpenAI's newer word for `system`, which few templates know."""
    role = "system" if message.role == "developer" and not keep_developer else message.role
    calls = [_template_call(call) for call in message.tool_calls or ()]
    optional = {"name": message.name, "tool_call_id": message.tool_call_id, "tool_calls": calls or None}
    given = {key: value for key, value in optional.items() if value is not None}
    return {"role": role, "content": message.text, **given}


def _template_call(call: AskedCall) -> Mapping[str, Any]:
    # Templates want the arguments as an object; as text they would be quoted once more.
    function = {"name": call.function.name, "arguments": call.function.parsed()}
    return {"id": call.id, "type": "function", "function": function}
