"""From a request to the mesh's sampling parameters and output limit."""

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from meshift.schemas.errors import ContextTooLong, InvalidRequest
from meshift.schemas.requests import Priority, Sampling
from meshift.services.frontend.http.errors import first_violation
from meshift.services.frontend.http.schemas import ChatRequest, Generation
from meshift.services.frontend.http.schemas.base import INT64_MAX

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


TEXT_OUTPUT_DEFAULT = 16
"""Output limit of plain completions that name none, as at OpenAI."""


@dataclass(frozen=True, slots=True)
class Room:
    """What a prompt leaves of its model's context, in tokens. `param` is the field that the prompt came from."""

    param: str
    prompt: int
    context_max: int
    vocabulary: int
    """Token ids that the model has."""


def to_sampling(request: Generation, room: Room, *, output_default: int, **more: object) -> Sampling:
    """`more` are fields of `Sampling` beyond those that all requests have. Raises `ContextTooLong`, or `InvalidRequest`
    that names the client's field."""
    limit = _output_limit(request, room, output_default)
    values: dict[str, object] = {"max_new_tokens": limit, "stop": tuple(request.stop or ()), **more}
    values.update({name: value for name in _SAME_NAMES if (value := getattr(request, name)) is not None})
    if request.logit_bias:
        values["logit_bias"] = _biases(request.logit_bias, room)
    if request.top_k is not None:
        values["top_k"] = request.top_k or -1  # 0 switches it off, too
    if request.min_tokens is not None:
        values["min_new_tokens"] = request.min_tokens
        if request.min_tokens > limit:
            message = f"min_tokens: {request.min_tokens} is more than the output limit of {limit} tokens"
            raise InvalidRequest(message, param="min_tokens")
    try:
        return Sampling.model_validate(values)
    except ValidationError as error:
        # What can still fail has the same name on both sides.
        raise first_violation(error) from error


def _biases(wanted: Mapping[str, float], room: Room) -> tuple[tuple[int, float], ...]:
    biases = tuple(sorted((int(token), bias) for token, bias in wanted.items()))
    largest, _ = biases[-1]
    if largest >= room.vocabulary:
        message = f"logit_bias has token {largest}, but the model has {room.vocabulary}"
        raise InvalidRequest(message, param="logit_bias")
    return biases


def of_choice(sampling: Sampling, index: int) -> Sampling:
    """The same for choice `index` of a prompt: with a seed of its own."""
    if sampling.seed is None or index == 0:
        return sampling
    seed = sampling.seed + index
    return sampling.model_copy(update={"seed": seed if seed <= INT64_MAX else seed - 2**64})


def to_priority(request: Generation) -> Priority:
    """One number for both, the place in the queue and the protection while running."""
    priority = request.priority or 0
    return Priority(scheduling=priority, execution=priority)


def _output_limit(request: Generation, room: Room, output_default: int) -> int:
    left = room.context_max - room.prompt
    if left < 1:
        message = f"the context length is {room.context_max} tokens, and {room.param} has {room.prompt}"
        raise ContextTooLong(message, param=room.param)
    name, wanted = _wanted_output(request)
    if wanted is None:
        return min(left, output_default)
    if wanted > left:
        message = (
            f"the context length is {room.context_max} tokens, but {room.prompt + wanted} were requested: "
            f"{room.prompt} in {room.param}, {wanted} in the completion"
        )
        raise ContextTooLong(message, param=name)
    return wanted


def _wanted_output(request: Generation) -> tuple[str, int | None]:
    newer = request.max_completion_tokens if isinstance(request, ChatRequest) else None
    if newer is None:
        return "max_tokens", request.max_tokens
    if request.max_tokens not in (None, newer):
        message = "max_tokens: contradicts max_completion_tokens; set one of them"
        raise InvalidRequest(message, param="max_tokens")
    return "max_completion_tokens", newer
