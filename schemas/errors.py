"""Error codes, and the one exception tree of the mesh.

MeshError
+-- CallerError          the caller can mend it: bad input                       4xx
|   +-- InvalidRequest       a field is wrong; `param` names it                   400
|   +-- ContextTooLong       prompt (and output) don't fit the model              400
|   +-- MessageTooLarge      over the bus limit                                   413
|   +-- Unauthorized         no key, or a wrong one                               401
|   +-- NotFound             unknown model, request, instance                     404
|   +-- Unsupported          this engine can't do it                              400
|   +-- MoveDeclined         the request can't be moved so, now; `refusal`        409
|   +-- LayoutDeclined       the layout can't be changed so, now; `refusal`       409
+-- OverloadError        try later                                               429/503
|   +-- Overloaded           a queue or a limit is full                           429
|   +-- Unavailable          no instance can take it now                          503
+-- PeerError            another service failed; retry elsewhere
|   +-- PeerTimeout          no answer by the deadline                            504
|   +-- PeerGone             nobody serves that subject                           503
|   +-- Stale                the sender's attempt, hop or owner is superseded     409
|   +-- BusClosed            this bus client is closed                            503
+-- InternalError        a bug of ours                                           500
"""

from enum import StrEnum
from typing import ClassVar, Literal

from meshift.schemas.base import Message


class ErrorCode(StrEnum):
    """The codes on the wire."""

    INVALID_REQUEST = "invalid_request"
    CONTEXT_TOO_LONG = "context_length_exceeded"
    MESSAGE_TOO_LARGE = "request_too_large"
    UNAUTHORIZED = "invalid_api_key"
    NOT_FOUND = "not_found"
    UNSUPPORTED = "unsupported"
    MOVE_DECLINED = "move_declined"
    LAYOUT_DECLINED = "layout_declined"
    OVERLOADED = "overloaded"
    UNAVAILABLE = "unavailable"
    PEER_TIMEOUT = "timeout"
    PEER_GONE = "peer_gone"
    STALE = "stale"
    BUS_CLOSED = "bus_closed"
    INTERNAL = "internal_error"


class MeshError(Exception):
    """Base of all errors that cross a room's wall. `http_status` is what a REST client gets."""

    code: ClassVar[ErrorCode] = ErrorCode.INTERNAL
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class CallerError(MeshError):
    """The caller's mistake; the same call fails again."""

    code = ErrorCode.INVALID_REQUEST
    http_status = 400


class InvalidRequest(CallerError):
    """A field is wrong; `param` names it."""


class ContextTooLong(CallerError):
    """The prompt, or prompt plus output, doesn't fit."""

    code = ErrorCode.CONTEXT_TOO_LONG


class MessageTooLarge(CallerError):
    """Over `PAYLOAD_BYTES_MAX`."""

    code = ErrorCode.MESSAGE_TOO_LARGE
    http_status = 413


class Unauthorized(CallerError):
    """No key, or a wrong one."""

    code = ErrorCode.UNAUTHORIZED
    http_status = 401


class NotFound(CallerError):
    """Unknown model, request or instance."""

    code = ErrorCode.NOT_FOUND
    http_status = 404


class Unsupported(CallerError):
    """This engine or build can't do it."""

    code = ErrorCode.UNSUPPORTED


class MoveDeclined(CallerError):
    """The request is where it was, as it was. `refusal` is a `MoveRefusal`; a REST client finds it as the `code`."""

    code = ErrorCode.MOVE_DECLINED
    http_status = 409

    def __init__(self, message: str, *, param: str | None = None, refusal: str = "unknown") -> None:
        super().__init__(message, param=param)
        self.refusal = refusal


class LayoutDeclined(CallerError):
    """The instance is as it was. `refusal` is a `LayoutRefusal`; a REST client finds it as the `code`."""

    code = ErrorCode.LAYOUT_DECLINED
    http_status = 409

    def __init__(self, message: str, *, param: str | None = None, refusal: str = "unknown") -> None:
        super().__init__(message, param=param)
        self.refusal = refusal


class OverloadError(MeshError):
    """Try again later."""

    code = ErrorCode.UNAVAILABLE
    http_status = 503


class Overloaded(OverloadError):
    """A bound was reached."""

    code = ErrorCode.OVERLOADED
    http_status = 429


class Unavailable(OverloadError):
    """No instance can take the request now."""


class PeerError(MeshError):
    """Another service failed; the work may be done elsewhere."""

    code = ErrorCode.PEER_GONE
    http_status = 503


class PeerTimeout(PeerError):
    """No answer by the deadline; whether it was done is unknown."""

    code = ErrorCode.PEER_TIMEOUT
    http_status = 504


class PeerGone(PeerError):
    """Nobody serves that subject."""


class Stale(PeerError):
    """The sender's identity is superseded; it must cancel."""

    code = ErrorCode.STALE
    http_status = 409


class BusClosed(PeerError):
    """This bus client is closed."""

    code = ErrorCode.BUS_CLOSED


class InternalError(MeshError):
    """A bug of ours."""


_CLASSES: tuple[type[MeshError], ...] = (
    InvalidRequest, ContextTooLong, MessageTooLarge, Unauthorized, NotFound, Unsupported, MoveDeclined, LayoutDeclined,
    Overloaded, Unavailable, PeerTimeout, PeerGone, Stale, BusClosed, InternalError,
)  # fmt: skip
_BY_CODE: dict[ErrorCode, type[MeshError]] = {cls.code: cls for cls in _CLASSES}


class ErrorReply(Message):
    """An endpoint's refusal."""

    kind: Literal["error"] = "error"
    code: ErrorCode
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: MeshError) -> "ErrorReply":
        """The wire form of an error."""
        return cls(code=error.code, message=error.message, param=error.param)

    def to_exception(self) -> MeshError:
        """The exception that the caller of the endpoint raises."""
        return _BY_CODE[self.code](self.message, param=self.param)
