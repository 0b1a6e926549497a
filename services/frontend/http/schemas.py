"""What clients send and get: OpenAI's chat completions, as far as they are served, with SGLang's extra parameters.

A field is one of:

- served: it does what OpenAI or, for `top_k`, `min_p`, `repetition_penalty`, `min_tokens` and `ignore_eos`, SGLang say;
  `priority` is meshift's own;
- accepted and ignored, because the answer doesn't depend on it: `user`, `safety_identifier`, `prompt_cache_key`,
  `prompt_cache_retention`, `metadata` (tags of stored completions) and `parallel_tool_calls` (there are no tools);
- known but not served: accepted with a value that asks for nothing (its default, null, an empty list), else refused;
- unknown: refused.
"""

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from meshift.schemas.limits import STOP_STRINGS_MAX
from meshift.services.frontend.http.errors import UNSUPPORTED_FIELD

FIELDS_MAX = 128
"""Fields of one JSON object. Without a bound, naming each unknown one would keep the event loop busy for seconds."""

MESSAGES_MAX = 4096
PARTS_MAX = 256
"""Messages of a chat and parts of a message, bounded for the same reason."""

METADATA_MAX = 16
"""Entries, as at OpenAI."""

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1


def only(*harmless: object) -> AfterValidator:
    """A field that isn't served: it may only carry one of these values."""

    def check(value: object) -> object:
        if not any(type(value) is type(allowed) and value == allowed for allowed in harmless):
            raise PydanticCustomError(UNSUPPORTED_FIELD, "this server doesn't support this field with this value")
        return value

    return AfterValidator(check)


def _listed(wrap: Callable[[str], object], expected: str) -> BeforeValidator:
    """A string stands for the list of it alone, so that errors name one path and not that of a union's branch."""

    def check(value: object) -> object:
        if isinstance(value, str):
            return [wrap(value)]
        if not isinstance(value, list):
            raise PydanticCustomError("string_or_list", expected)
        return value

    return BeforeValidator(check)


class Strict(BaseModel):
    """No unknown fields, no conversions."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _bound_fields(cls, data: object) -> object:
        if isinstance(data, dict) and len(data) > FIELDS_MAX:
            raise PydanticCustomError(
                "too_many_fields", "an object may have at most {limit} fields", {"limit": FIELDS_MAX}
            )
        return data


class TextPart(Strict):
    """A part of a message. Images, audio and files are not served."""

    type: Literal["text"]
    text: str


class ChatMessage(Strict):
    """One message, of any role."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        list[TextPart],
        Field(min_length=1, max_length=PARTS_MAX, fail_fast=True),
        _listed(lambda text: {"type": "text", "text": text}, "Input should be a string or a list of text parts"),
    ]
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[object, only(None, [])] = None
    function_call: Annotated[object, only(None)] = None
    refusal: Annotated[object, only(None)] = None
    audio: Annotated[object, only(None)] = None
    annotations: Annotated[object, only(None, [])] = None

    @property
    def text(self) -> str:
        """The content, parts joined as SGLang does it."""
        return " ".join(part.text for part in self.content)


class StreamOptions(Strict):
    """How to stream."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[object, only(None, False)] = None


StopStrings = Annotated[
    list[str],
    Field(max_length=STOP_STRINGS_MAX, fail_fast=True),
    _listed(lambda text: text, "Input should be a string or a list of strings"),
]


def _few(value: object) -> object:
    if isinstance(value, dict) and len(value) > METADATA_MAX:
        raise PydanticCustomError("too_long", "may have at most {limit} entries", {"limit": METADATA_MAX})
    return value


Metadata = Annotated[dict[str, str], BeforeValidator(_few)]


class ChatRequest(Strict):
    """The body of `POST /v1/chat/completions`. The ranges of sampling parameters are those of `Sampling`."""

    model: str
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MESSAGES_MAX, fail_fast=True)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    stop: StopStrings | None = None
    ignore_eos: bool | None = None

    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX)] | None = None

    priority: Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX)] | None = None

    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    metadata: Metadata | None = None
    parallel_tool_calls: bool | None = None

    n: Annotated[object, only(None, 1)] = None
    store: Annotated[object, only(None, False)] = None
    logprobs: Annotated[object, only(None, False)] = None
    top_logprobs: Annotated[object, only(None, 0)] = None
    logit_bias: Annotated[object, only(None, {})] = None
    response_format: Annotated[object, only(None, {"type": "text"})] = None
    tools: Annotated[object, only(None, [])] = None
    tool_choice: Annotated[object, only(None, "none", "auto")] = None
    functions: Annotated[object, only(None, [])] = None
    function_call: Annotated[object, only(None, "none", "auto")] = None
    modalities: Annotated[object, only(None, ["text"])] = None
    audio: Annotated[object, only(None)] = None
    prediction: Annotated[object, only(None)] = None
    reasoning_effort: Annotated[object, only(None)] = None
    verbosity: Annotated[object, only(None)] = None
    service_tier: Annotated[object, only(None, "auto", "default")] = None
    web_search_options: Annotated[object, only(None)] = None

    @field_validator("stream_options")
    @classmethod
    def _need_stream(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise PydanticCustomError("stream_options", "only allowed when stream is true")
        return value


class PromptTokensDetails(BaseModel):
    """Where the prompt's tokens came from."""

    cached_tokens: int


class Usage(BaseModel):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, *, prompt: int, completion: int, cached: int) -> "Usage":
        """From the three counts."""
        return cls(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        )


class AnswerMessage(BaseModel):
    """What the model said."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class Choice(BaseModel):
    """The only choice."""

    index: Literal[0] = 0
    message: AnswerMessage
    logprobs: None = None
    finish_reason: Literal["stop", "length"]


class ChatCompletion(BaseModel):
    """The answer to a request that doesn't stream."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage


class ModelCard(BaseModel):
    """A model in `/v1/models`."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "meshift"
    max_model_len: int
    """Context length in tokens, under the name that vLLM and SGLang use."""


class ModelList(BaseModel):
    """The answer of `GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(BaseModel):
    """The answer of `GET /health`."""

    status: Literal["ok"] = "ok"


class Readiness(BaseModel):
    """The answer of `GET /ready`."""

    status: Literal["ready", "not_ready"]
    reason: str | None = None
    scheduler: Literal["ok", "bypass"]
    instances: int
    """Live instances that this frontend knows."""
