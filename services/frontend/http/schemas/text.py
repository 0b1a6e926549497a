"""The body of `POST /v1/completions`: OpenAI's older interface, which goes on from a text or from tokens."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from meshift.schemas.limits import LOGPROBS_TOP_MAX
from meshift.services.frontend.http.schemas.base import INT32_MAX, Only
from meshift.services.frontend.http.schemas.generation import CHOICES_MAX, Generation

Prompt = str | list[int]
"""One prompt: text, or tokens."""


class _Prompts:
    """Annotation of the prompts: the four forms that OpenAI knows become a list of prompts, errors name the item."""

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(_prompts)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        text = {"type": "string", "minLength": 1}
        tokens = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": INT32_MAX}, "minItems": 1}
        many = {"type": "array", "minItems": 1, "maxItems": CHOICES_MAX}
        return {"anyOf": [text, tokens, {**many, "items": text}, {**many, "items": tokens}]}


def _prompts(value: object) -> list[Prompt]:
    if isinstance(value, str):
        return [_text(value)]
    if not isinstance(value, list) or not value:
        raise _wrong("must be a text, a list of tokens, or a list of texts or of lists of tokens, and not empty")
    if type(value[0]) is int:
        return [_tokens(value)]
    if len(value) > CHOICES_MAX:
        raise PydanticCustomError("too_long", "may have at most {limit} prompts", {"limit": CHOICES_MAX})
    if isinstance(value[0], str):
        return [_text(item) for item in value]
    return [_tokens(item) for item in value]


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise _wrong("each of its texts must be a string that is not empty")
    return value


def _tokens(value: object) -> list[int]:
    if not isinstance(value, list) or not value:
        raise _wrong("each of its token lists must be a list that is not empty")
    if not all(type(token) is int and 0 <= token <= INT32_MAX for token in value):
        raise _wrong("tokens must be integers from 0 on")
    return value


def _wrong(message: str) -> PydanticCustomError:
    return PydanticCustomError("prompt", "{message}", {"message": message})


def _top_count(value: Any) -> Any:
    if type(value) is int and not 0 <= value <= LOGPROBS_TOP_MAX:
        raise PydanticCustomError("logprobs", "must be from 0 to {limit}", {"limit": LOGPROBS_TOP_MAX})
    return value


class TextRequest(Generation):
    """A request for a plain completion."""

    prompt: Annotated[list[Prompt], _Prompts()]
    logprobs: Annotated[int, Field(ge=0, le=LOGPROBS_TOP_MAX), BeforeValidator(_top_count)] | None = None
    """Each token's log-probability, and those of so many likeliest tokens."""

    best_of: Annotated[object, Only(None, 1)] = None
    echo: Annotated[object, Only(None, False)] = None
    suffix: Annotated[object, Only(None, "")] = None
