"""Answers that refuse, as the mesh's own exceptions (`meshift.schemas.errors`)."""

import httpx
from pydantic import BaseModel, ValidationError

from meshift.schemas.errors import (
    ErrorCode,
    ErrorReply,
    InternalError,
    InvalidRequest,
    LayoutDeclined,
    MeshError,
    MoveDeclined,
    NotFound,
    Overloaded,
    PeerGone,
    PeerTimeout,
    Unauthorized,
    Unavailable,
)
from meshift.schemas.layouts import LayoutRefusal
from meshift.schemas.moves import MoveRefusal

MESSAGE_CHARS_MAX = 200
"""Of an answer that isn't in the error format, such as a proxy's page."""

_BY_STATUS: dict[int, type[MeshError]] = {
    401: Unauthorized,
    403: Unauthorized,
    404: NotFound,
    429: Overloaded,
    502: PeerGone,
    503: Unavailable,
    504: PeerTimeout,
}


class _Body(BaseModel):
    message: str
    param: str | None = None
    code: str | None = None


_MOVES = frozenset(refusal.value for refusal in MoveRefusal)
_LAYOUTS = frozenset(refusal.value for refusal in LayoutRefusal)


class _Envelope(BaseModel):
    error: _Body


def refusal(status: int, body: bytes | str) -> MeshError:
    """The exception for a response that isn't a success, or for an error in a stream (status 500)."""
    try:
        error = _Envelope.model_validate_json(body).error
    except ValidationError:
        text = body.decode(errors="replace") if isinstance(body, bytes) else body
        return _of_status(status)(f"HTTP {status}: {text[:MESSAGE_CHARS_MAX]}")
    try:
        code = ErrorCode(error.code or "")
    except ValueError:
        if status == httpx.codes.CONFLICT and error.code is not None:
            # Some words are of both; what was asked for says which is meant.
            if error.param == "layers" and error.code in _LAYOUTS:
                return LayoutDeclined(error.message, param=error.param, refusal=error.code)
            if error.code in _MOVES:
                return MoveDeclined(error.message, param=error.param, refusal=error.code)
        # OpenAI's codes, and those of other servers.
        return _of_status(status)(error.message, param=error.param)
    return ErrorReply(code=code, message=error.message, param=error.param).to_exception()


def _of_status(status: int) -> type[MeshError]:
    return _BY_STATUS.get(status, InternalError if status >= 500 else InvalidRequest)


def broken(error: httpx.HTTPError, url: str) -> MeshError:
    """The exception for a connection that fails."""
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return PeerGone(f"no mesh answers at {url}")
    if isinstance(error, httpx.TimeoutException):
        return PeerTimeout(f"{url} was silent for too long")
    return PeerGone(f"the connection to {url} broke: {error}")
