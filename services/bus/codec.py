"""Messages to bytes and back: JSON by pydantic's core, with the size limit and errors of the mesh."""

from functools import lru_cache
from typing import TypeVar

from pydantic import ValidationError

from meshift.schemas.base import Message
from meshift.schemas.errors import InvalidRequest, MessageTooLarge
from meshift.schemas.limits import PAYLOAD_BYTES_MAX

MessageT = TypeVar("MessageT", bound=Message)

# Base64 turns 3 bytes into 4 characters.
BASE64_BYTES = 3
BASE64_CHARACTERS = 4


def encode(message: Message) -> bytes:
    """The JSON form. Raises `MessageTooLarge`."""
    payload = message.__pydantic_serializer__.to_json(message)
    check_size(len(payload), message)
    return payload


def decode(message_type: type[MessageT], payload: bytes) -> MessageT:
    """Validate the JSON form. Raises `InvalidRequest`; its `param` names the first wrong field."""
    try:
        return message_type.__pydantic_validator__.validate_json(payload)  # type: ignore[no-any-return]
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise InvalidRequest(
            f"not a valid {message_type.__name__}: {field or 'message'}: {first['msg']}", param=field or None
        ) from None


class SharedDecoder:
    """`decode` for several receivers of one published message: those that follow each other get the one frozen object.

    What is refused is validated anew for each.
    """

    def __init__(self) -> None:
        self._payload: bytes | None = None
        self._message: Message | None = None

    def decode(self, message_type: type[MessageT], payload: bytes) -> MessageT:
        """See the function."""
        if payload is not self._payload or type(self._message) is not message_type:
            self._payload, self._message = payload, decode(message_type, payload)
        return self._message


def check_size(size: int, message: Message) -> None:
    """Raise `MessageTooLarge` if an encoded body of `size` bytes is over the limit."""
    if size > PAYLOAD_BYTES_MAX:
        raise MessageTooLarge(f"{type(message).__name__} has {size} bytes; the bus takes {PAYLOAD_BYTES_MAX}")


def check_packed_size(message: Message) -> None:
    """Raise `MessageTooLarge` if the packed tokens of `message` alone are over the limit once encoded.

    A lower bound of the real size that costs no encoding: only what stands in bytes fields of the message itself
    is counted, and nothing else in a message grows with a prompt.
    """
    for name in _bytes_fields(type(message)):
        value = getattr(message, name)
        if len(value) > PAYLOAD_BYTES_MAX // BASE64_CHARACTERS * BASE64_BYTES:
            check_size(-(-len(value) // BASE64_BYTES) * BASE64_CHARACTERS, message)


@lru_cache(maxsize=256)
def _bytes_fields(message_type: type[Message]) -> tuple[str, ...]:
    return tuple(name for name, field in message_type.model_fields.items() if field.annotation is bytes)
