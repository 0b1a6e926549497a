"""What clients get."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

FinishName = Literal["stop", "length", "tool_calls"]


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


class CalledFunction(BaseModel):
    """What the model calls; `arguments` is JSON as a string."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A call that the model makes."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class TopLogprob(BaseModel):
    """A token and its natural log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TopLogprob):
    """A token of the answer, with the likeliest ones at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """The tokens of an answer's content."""

    content: list[ContentLogprob]
    refusal: None = None


class AnswerMessage(BaseModel):
    """What the model said."""

    model_config = ConfigDict(json_schema_serialization_defaults_required=False)

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishName


class ChatCompletion(BaseModel):
    """The answer to a chat request that doesn't stream."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class TextLogprobs(BaseModel):
    """Log-probabilities, in columns: one entry a token. A token that isn't UTF-8 by itself is written
    `bytes:\\xe4\\xbd`."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(BaseModel):
    """One continuation. Those of prompt i, of `n` each, are the choices from `i * n` on."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: Literal["stop", "length"]


class TextCompletion(BaseModel):
    """The answer to a completion request that doesn't stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
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


def compact(answer: BaseModel) -> dict[str, Any]:
    """The answer's JSON value: `tool_calls` only where there are some, everything else as it is."""
    value = answer.model_dump()
    for choice in value.get("choices", ()):
        if "message" in choice and choice["message"]["tool_calls"] is None:
            del choice["message"]["tool_calls"]
    return value
