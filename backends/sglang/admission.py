"""What the engine refuses before SGLang sees it. Pure.

SGLang trusts its own frontend: an id outside the vocabulary, or a request that can never fit, would end or block a
rank, not just the request.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from meshift.backends.base import EngineRequest
from meshift.schemas.errors import ContextTooLong, InvalidRequest
from meshift.schemas.requests import Sampling

SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1
PRIORITY_MIN, PRIORITY_MAX = -(2**31), 2**31 - 1


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What the started ranks can take."""

    tokens_max: int
    """Prompt plus output."""
    vocabulary_size: int


def check_request(request: EngineRequest, limits: RequestLimits) -> None:
    """Raise InvalidRequest or ContextTooLong if it can't run."""
    if not request.prompt:
        raise InvalidRequest("the prompt is empty", param="prompt")
    _check_tokens(request.prompt, limits, "prompt")
    _check_tokens(request.output, limits, "output")
    _check_sampling(request.sampling, limits)
    if not PRIORITY_MIN <= request.priority.scheduling <= PRIORITY_MAX:
        raise InvalidRequest("the priority is out of range", param="priority")
    if len(request.output) > request.sampling.max_new_tokens:
        raise InvalidRequest("there is more output already than max_new_tokens", param="output")
    wanted = len(request.prompt) + request.sampling.max_new_tokens
    if wanted > limits.tokens_max:
        raise ContextTooLong(
            f"prompt ({len(request.prompt)}) and max_new_tokens ({request.sampling.max_new_tokens}) make {wanted} "
            f"tokens; this engine takes {limits.tokens_max}",
            param="max_new_tokens",
        )


def _check_tokens(tokens: Sequence[int], limits: RequestLimits, name: str) -> None:
    if tokens and (min(tokens) < 0 or max(tokens) >= limits.vocabulary_size):
        raise InvalidRequest(f"{name} has token ids outside 0..{limits.vocabulary_size - 1}", param=name)


def _check_sampling(sampling: Sampling, limits: RequestLimits) -> None:
    if sampling.min_new_tokens > sampling.max_new_tokens:
        raise InvalidRequest("min_new_tokens is above max_new_tokens", param="min_new_tokens")
    if sampling.top_k == 0:
        raise InvalidRequest("top_k must be -1 or at least 1", param="top_k")
    if sampling.seed is not None and not SEED_MIN <= sampling.seed <= SEED_MAX:
        raise InvalidRequest("the seed must fit into 64 bits", param="seed")
    _check_tokens(sampling.stop_token_ids, limits, "stop_token_ids")
