"""What every message of the mesh is: frozen, versioned, tagged, and strict about what it doesn't know."""

from array import array
from collections.abc import Callable, Iterable
from functools import cache
from typing import Annotated, Any, ParamSpec, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict

PROTOCOL_VERSION = 1

# Token ids are 32-bit little-endian on the wire; `array("i")` is that on every machine that SGLang runs on.
TOKEN_BYTES = 4

_set = object.__setattr__
"""Also of what is frozen."""


Values = ParamSpec("Values")
PartT = TypeVar("PartT", bound="Part")


class Part(BaseModel):
    """A frozen piece of a message; not sent alone."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")


def trusted(part_type: Callable[Values, PartT], *_: Values.args, **values: Values.kwargs) -> PartT:
    """A message or a part of one without validation, for what is made all the time from values that are known to be
    right: by name, and all that have no default. The type checker knows them. Whoever gets it over a network validates
    it."""
    assert isinstance(part_type, type)
    part: PartT = object.__new__(part_type)
    defaults, names = _fields(part_type)
    _set(part, "__dict__", defaults | values)
    _set(part, "__pydantic_fields_set__", names)
    _set(part, "__pydantic_extra__", None)
    _set(part, "__pydantic_private__", None)
    return part


@cache
def _fields(part_type: type[Part]) -> tuple[dict[str, Any], set[str]]:
    """The defaults, in the order of the fields, and the names of all. Not to be changed."""
    return {name: field.default for name, field in part_type.model_fields.items()}, set(part_type.model_fields)


def _same_version(value: int) -> int:
    if value != PROTOCOL_VERSION:
        raise ValueError(f"protocol version {value} is not {PROTOCOL_VERSION}: upgrade the older service")
    return value


class Message(Part):
    """A frozen message. Subclasses add `kind: Literal[...]`, the tag by which a receiver refuses a wrong one."""

    version: Annotated[int, AfterValidator(_same_version)] = PROTOCOL_VERSION


def _whole_tokens(value: bytes) -> bytes:
    if len(value) % TOKEN_BYTES:
        raise ValueError(f"packed token ids must be a multiple of {TOKEN_BYTES} bytes, got {len(value)}")
    return value


PackedTokens = Annotated[bytes, AfterValidator(_whole_tokens)]
"""Token ids, packed: 4 bytes each."""


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Token ids to their packed form."""
    return array("i", tokens).tobytes()


def unpack_tokens(packed: bytes) -> "array[int]":
    """The packed form to an `array("i")` of token ids."""
    tokens = array("i")
    tokens.frombytes(packed)
    return tokens


def count_tokens(packed: bytes) -> int:
    """How many token ids a packed string holds."""
    return len(packed) // TOKEN_BYTES
