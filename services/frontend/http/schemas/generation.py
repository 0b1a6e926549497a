"""The fields that both kinds of completions have."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from meshift.schemas.limits import LOGIT_BIAS_MAX, STOP_STRINGS_MAX
from meshift.services.frontend.http.schemas.base import INT32_MAX, INT64_MAX, Listed, Only, Strict

CHOICES_MAX = 128
"""Answers to one request: those to all its prompts, together. `n` has the same bound at OpenAI."""

METADATA_MAX = 16
"""Entries, as at OpenAI."""


class StreamOptions(Strict):
    """How to stream."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[object, Only(None, False)] = None


StopStrings = Annotated[
    list[str],
    Field(max_length=STOP_STRINGS_MAX, fail_fast=True),
    Listed("Input should be a string or a list of strings"),
]


def _few(value: object) -> object:
    if isinstance(value, dict) and len(value) > METADATA_MAX:
        raise PydanticCustomError("too_long", "may have at most {limit} entries", {"limit": METADATA_MAX})
    return value


Metadata = Annotated[dict[str, str], BeforeValidator(_few)]


def _few_biases(value: object) -> object:
    if isinstance(value, dict) and len(value) > LOGIT_BIAS_MAX:
        raise PydanticCustomError("too_long", "may have at most {limit} entries", {"limit": LOGIT_BIAS_MAX})
    return value


TokenId = Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,8})$")]
LogitBias = Annotated[
    dict[TokenId, Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=LOGIT_BIAS_MAX),
    BeforeValidator(_few_biases),
]


def _choice_count(value: Any) -> Any:
    # Strict integers take neither true nor 1.0; this only keeps the message free of pydantic's own words.
    if type(value) is int and not 1 <= value <= CHOICES_MAX:
        raise PydanticCustomError("choice_count", "must be from 1 to {limit}", {"limit": CHOICES_MAX})
    return value


class Generation(Strict):
    """What is generated and how. The ranges of sampling parameters are those of the mesh's `Sampling`."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=CHOICES_MAX), BeforeValidator(_choice_count)] | None = None
    """So many answers, drawn independently: with `seed`, answer i has the seed `seed + i`."""

    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    stop: StopStrings | None = None
    ignore_eos: bool | None = None

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    seed: Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX)] | None = None

    logit_bias: LogitBias | None = None
    """By token id, from -100 (never) to 100 (always)."""

    priority: Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX)] | None = None
    """Greater is more important; meshift's own."""

    user: str | None = None
    metadata: Metadata | None = None

    service_tier: Annotated[object, Only(None, "auto", "default")] = None

    @property
    def choices_per_prompt(self) -> int:
        """`n`, or its default."""
        return self.n or 1

    @field_validator("stream_options")
    @classmethod
    def _need_stream(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise PydanticCustomError("stream_options", "only allowed when stream is true")
        return value
