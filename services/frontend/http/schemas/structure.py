"""JSON schemas that clients send: of answers, and of tools' parameters."""

import json
from typing import Annotated, Any, Literal

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from pydantic import AfterValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from meshift.services.frontend.http.schemas.base import Strict

SCHEMA_CHARS_MAX = 64 * 1024
"""A schema's text. The grammar that is compiled from it is a multiple of that."""

SCHEMA_DEPTH_MAX = 64
"""Objects and lists inside each other."""

NAME_CHARS_MAX = 64

Name = Annotated[str, Field(min_length=1, max_length=NAME_CHARS_MAX, pattern=r"^[A-Za-z0-9_.-]+$")]


def _depth(value: object) -> int:
    """How deep a JSON value is, as far as it matters."""
    level, depth = [value], 0
    while level and depth <= SCHEMA_DEPTH_MAX:
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [member for members in inner for member in members]
        depth += 1
    return depth


def _check(schema: dict[str, Any]) -> dict[str, Any]:
    # The depth first: what writes and checks schemas is recursive.
    if _depth(schema) > SCHEMA_DEPTH_MAX:
        raise PydanticCustomError("json_schema", "is deeper than {limit} levels", {"limit": SCHEMA_DEPTH_MAX})
    if len(json.dumps(schema)) > SCHEMA_CHARS_MAX:
        raise PydanticCustomError("json_schema", "is longer than {limit} characters", {"limit": SCHEMA_CHARS_MAX})
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise PydanticCustomError("json_schema", "is no valid JSON schema: {why}", {"why": error.message}) from error
    return schema


JsonSchema = Annotated[dict[str, Any], AfterValidator(_check)]


class NamedSchema(Strict):
    """A schema with its name, as OpenAI wants it."""

    model_config = ConfigDict(serialize_by_alias=True)

    name: Name
    description: str | None = None
    strict: bool | None = None
    """Accepted and ignored: the output always obeys the schema."""
    json_schema: Annotated[JsonSchema, Field(alias="schema")]


class ResponseFormat(Strict):
    """What the answer looks like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _schema_if_named(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError("response_format", "json_schema belongs to the type json_schema, which needs it")
        return self

    def schema_text(self) -> str | None:
        """The schema that the output obeys, as JSON; None for any text."""
        if self.type == "text":
            return None
        schema = {"type": "object"} if self.json_schema is None else self.json_schema.json_schema
        return json.dumps(schema)
