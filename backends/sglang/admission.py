"""What the engine refuses before SGLang sees it. Pure.

SGLang trusts its own frontend: an id outside the vocabulary, or a request that can never fit, would end or block a
rank, not just the request.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from meshift.backends.base import EngineRequest
from meshift.schemas.errors import ContextTooLong, InvalidRequest, Unsupported
from meshift.schemas.requests import Sampling

SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1
SCHEMA_DEPTH_MAX = 100
"""Levels of JSON. The time to compile grows faster than the square of the depth, and nothing can stop a compilation."""

PRIORITY_MIN, PRIORITY_MAX = -(2**31), 2**31 - 1


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What the started ranks can take."""

    tokens_max: int
    """Prompt plus output."""
    vocabulary_size: int
    obeys_schemas: bool = True


def check_request(request: EngineRequest, limits: RequestLimits) -> None:
    """Raise InvalidRequest, ContextTooLong or Unsupported if it can't run."""
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
    _check_tokens([token for token, _ in sampling.logit_bias], limits, "logit_bias")
    if sampling.json_schema is not None:
        _check_schema(sampling, sampling.json_schema, limits)


def _check_schema(sampling: Sampling, text: str, limits: RequestLimits) -> None:
    """What can be said without compiling it; the ranks refuse the rest, with a finish that names the field."""
    if not limits.obeys_schemas:
        raise Unsupported("this model's tokenizer doesn't allow constrained output", param="json_schema")
    for name in ("min_new_tokens", "ignore_eos"):
        if getattr(sampling, name):
            # A schema decides itself where the output may and must end.
            raise InvalidRequest(f"{name} can't be combined with json_schema", param=name)
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the schema isn't JSON: {error}", param="json_schema") from None
    if not isinstance(schema, dict | bool):
        raise InvalidRequest("a schema is an object", param="json_schema")
    if _is_deep(schema):
        raise InvalidRequest(f"the schema is nested deeper than {SCHEMA_DEPTH_MAX} levels", param="json_schema")


def _is_deep(schema: object) -> bool:
    level = [schema]
    for _ in range(SCHEMA_DEPTH_MAX):
        containers = [
            item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)
        ]
        level = [item for container in containers for item in container]
        if not level:
            return False
    return True
