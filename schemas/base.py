"""What every message of the mesh is: frozen, versioned, tagged, and strict about what it doesn't know."""

from array import array
from collections.abc import Iterable
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

PROTOCOL_VERSION = 1

# Token ids are 32-bit little-endian on the wire; `array("i")` is that on every machine that SGLang runs on.
TOKEN_BYTES = 4


class Part(BaseModel):
    """A frozen piece of a message; not sent alone."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")


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
