"""From a chat request to the mesh's sampling parameters and output limit."""

from pydantic import ValidationError

from meshift.schemas.errors import ContextTooLong, InvalidRequest
from meshift.schemas.requests import Priority, Sampling
from meshift.services.frontend.http.errors import first_violation
from meshift.services.frontend.http.schemas import ChatRequest

_SAME_NAMES = (
    "temperature",
    "top_p",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "ignore_eos",
    "seed",
)


def to_sampling(chat: ChatRequest, *, prompt_tokens: int, context_tokens_max: int, output_default: int) -> Sampling:
    """Raises `ContextTooLong`, or `InvalidRequest` that names the client's field."""
    limit = _output_limit(chat, prompt_tokens, context_tokens_max, output_default)
    values: dict[str, object] = {"max_new_tokens": limit, "stop": tuple(chat.stop or ())}
    values.update({name: value for name in _SAME_NAMES if (value := getattr(chat, name)) is not None})
    if chat.top_k is not None:
        values["top_k"] = chat.top_k or -1  # 0 switches it off, too
    if chat.min_tokens is not None:
        values["min_new_tokens"] = chat.min_tokens
        if chat.min_tokens > limit:
            message = f"min_tokens: {chat.min_tokens} is more than the output limit of {limit} tokens"
            raise InvalidRequest(message, param="min_tokens")
    try:
        return Sampling.model_validate(values)
    except ValidationError as error:
        # What can still fail has the same name on both sides.
        raise first_violation(error) from error


def to_priority(chat: ChatRequest) -> Priority:
    """One number for both, the place in the queue and the protection while running."""
    priority = chat.priority or 0
    return Priority(scheduling=priority, execution=priority)


def _output_limit(chat: ChatRequest, prompt_tokens: int, context_tokens_max: int, output_default: int) -> int:
    left = context_tokens_max - prompt_tokens
    if left < 1:
        message = f"the context length is {context_tokens_max} tokens, and the messages have {prompt_tokens}"
        raise ContextTooLong(message, param="messages")
    name, wanted = _wanted_output(chat)
    if wanted is None:
        return min(left, output_default)
    if wanted > left:
        message = (
            f"the context length is {context_tokens_max} tokens, but {prompt_tokens + wanted} were requested: "
            f"{prompt_tokens} in the messages, {wanted} in the completion"
        )
        raise ContextTooLong(message, param=name)
    return wanted


def _wanted_output(chat: ChatRequest) -> tuple[str, int | None]:
    if chat.max_completion_tokens is None:
        return "max_tokens", chat.max_tokens
    if chat.max_tokens not in (None, chat.max_completion_tokens):
        message = "max_tokens: contradicts max_completion_tokens; set one of them"
        raise InvalidRequest(message, param="max_tokens")
    return "max_completion_tokens", chat.max_completion_tokens
