"""The body of `POST /v1/chat/completions`."""

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from meshift.schemas.limits import LOGPROBS_TOP_MAX
from meshift.services.frontend.http.schemas.base import INT32_MAX, Listed, Only, Strict
from meshift.services.frontend.http.schemas.generation import Generation
from meshift.services.frontend.http.schemas.structure import ResponseFormat
from meshift.services.frontend.http.schemas.tools import (
    TOOL_CALLS_MAX,
    TOOLS_MAX,
    AskedCall,
    Tool,
    ToolChoice,
    ToolChoiceField,
)

MESSAGES_MAX = 4096
PARTS_MAX = 256
"""Messages of a chat and parts of a message, bounded for the reason of `FIELDS_MAX`."""


class TextPart(Strict):
    """A part of a message. Images, audio and files are not served."""

    type: Literal["text"]
    text: str


class ChatMessage(Strict):
    """One message, of any role. Only an assistant's that has `tool_calls` may do without content."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: Annotated[list[AskedCall], Field(max_length=TOOL_CALLS_MAX, fail_fast=True)] | None = None
    content: Annotated[
        Annotated[
            list[TextPart],
            Field(min_length=1, max_length=PARTS_MAX, fail_fast=True),
            Listed("Input should be a string or a list of text parts", lambda text: {"type": "text", "text": text}),
        ]
        | None,
        Field(validate_default=True),
    ] = None
    name: str | None = None
    tool_call_id: str | None = None
    function_call: Annotated[object, Only(None)] = None
    refusal: Annotated[object, Only(None)] = None
    audio: Annotated[object, Only(None)] = None
    annotations: Annotated[object, Only(None, [])] = None

    @field_validator("content")
    @classmethod
    def _need_content(cls, value: list[TextPart] | None, info: ValidationInfo) -> list[TextPart] | None:
        if value is None and not info.data.get("tool_calls"):
            raise PydanticCustomError("content", "Input should be a string or a list of text parts")
        return value

    @field_validator("tool_calls")
    @classmethod
    def _only_assistant(cls, value: list[AskedCall] | None, info: ValidationInfo) -> list[AskedCall] | None:
        if value and info.data.get("role") != "assistant":
            raise PydanticCustomError("tool_calls", "only an assistant's message may have tool calls")
        return value

    @property
    def text(self) -> str:
        """The content, parts joined as SGLang does it."""
        return " ".join(part.text for part in self.content or ())


class ChatRequest(Generation):
    """A request for a chat completion."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MESSAGES_MAX, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=LOGPROBS_TOP_MAX)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=TOOLS_MAX, fail_fast=True)] | None = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool | None = None

    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    store: Annotated[object, Only(None, False)] = None
    functions: Annotated[object, Only(None, [])] = None
    function_call: Annotated[object, Only(None, "none", "auto")] = None
    modalities: Annotated[object, Only(None, ["text"])] = None
    audio: Annotated[object, Only(None)] = None
    prediction: Annotated[object, Only(None)] = None
    reasoning_effort: Annotated[object, Only(None)] = None
    verbosity: Annotated[object, Only(None)] = None
    web_search_options: Annotated[object, Only(None)] = None

    @field_validator("top_logprobs")
    @classmethod
    def _need_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise PydanticCustomError("top_logprobs", "only allowed when logprobs is true")
        return value

    @field_validator("tool_choice")
    @classmethod
    def _need_tools(cls, value: ToolChoice | None, info: ValidationInfo) -> ToolChoice | None:
        if "tools" not in info.data or value is None or value.mode in ("none", "auto"):
            return value
        names = {tool.function.name for tool in info.data["tools"] or ()}
        if not names:
            raise PydanticCustomError("tool_choice", "only allowed with tools")
        if value.mode == "named" and value.name not in names:
            raise PydanticCustomError("tool_choice", "none of the tools has that name")
        return value
