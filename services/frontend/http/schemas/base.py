"""What all request bodies share: strictness, and fields whose schema says what the validator does."""

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from meshift.services.frontend.http.errors import UNSUPPORTED_FIELD

FIELDS_MAX = 128
"""Fields of one JSON object. Without a bound, naming each unknown one would keep the event loop busy for seconds."""

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1


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


class Only:
    """Annotation of a field that isn't served: it may only carry one of these values."""

    def __init__(self, *harmless: object) -> None:
        self._harmless = harmless

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": list(self._harmless), "description": "Not served: it may only ask for nothing."}

    def _check(self, value: object) -> object:
        if not any(type(value) is type(allowed) and value == allowed for allowed in self._harmless):
            raise PydanticCustomError(UNSUPPORTED_FIELD, "this server doesn't support this field with this value")
        return value


class Listed:
    """Annotation of a list: a string stands for the list of it alone, so that errors name one path and not that of a
    union's branch."""

    def __init__(self, expected: str, wrap: Callable[[str], object] = lambda text: text) -> None:
        self._expected = expected
        self._wrap = wrap

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"type": "string"}, handler(schema)]}

    def _check(self, value: object) -> object:
        if isinstance(value, str):
            return [self._wrap(value)]
        if not isinstance(value, list):
            raise PydanticCustomError("string_or_list", "{expected}", {"expected": self._expected})
        return value
