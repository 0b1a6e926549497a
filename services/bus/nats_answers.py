"""The wire form of answers and errors, and the sizes that a server takes."""

from meshift.schemas.base import Message
from meshift.schemas.errors import ErrorReply, MessageTooLarge
from meshift.services.bus.base import Headers
from meshift.services.bus.codec import encode
from meshift.services.bus.nats_library import ERROR_CODE_HEADER, ERROR_HEADER

ERROR_TEXT_CHARS_MAX = 256
"""Of an error's text, what also goes into a header, for the `nats` tools; the whole stands in the body."""

HEADER_LINE_BYTES = len("NATS/1.0\r\n") + len("\r\n")
HEADER_FIELD_BYTES = len(": \r\n")


def header_size(headers: Headers | None) -> int:
    """Bytes of the headers on the wire; a NATS server counts them in the size of a message."""
    if not headers:
        return 0
    fields = (len(key) + len(value.encode()) + HEADER_FIELD_BYTES for key, value in headers.items())
    return HEADER_LINE_BYTES + sum(fields)


def check_wire_size(payload: bytes, headers: Headers | None, bytes_max: int | None) -> None:
    """Raise `MessageTooLarge` if the server would close the connection over this message. None: not known yet."""
    size = len(payload) + header_size(headers)
    if bytes_max is not None and size > bytes_max:
        raise MessageTooLarge(f"a message of {size} bytes with its headers; the NATS server takes {bytes_max}")


def encode_answer(message: Message, bytes_max: int | None) -> tuple[bytes, dict[str, str] | None]:
    """Body and headers of an endpoint's answer. One that is too large becomes an error, so that the caller learns of
    it now."""
    if isinstance(message, ErrorReply):
        return _encode_error(message)
    try:
        payload = encode(message)
        check_wire_size(payload, None, bytes_max)
    except MessageTooLarge as error:
        return _encode_error(ErrorReply.of(error))
    return payload, None


def _encode_error(reply: ErrorReply) -> tuple[bytes, dict[str, str]]:
    headers = {
        ERROR_HEADER: reply.message[:ERROR_TEXT_CHARS_MAX],
        ERROR_CODE_HEADER: str(reply.to_exception().http_status),
    }
    return encode(reply), headers
