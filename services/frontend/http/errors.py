"""Errors as a REST client sees them: `{"error": {"message", "type", "param", "code"}}`, never a traceback."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from meshift.schemas.errors import (
    CallerError,
    ErrorCode,
    InvalidRequest,
    LayoutDeclined,
    MeshError,
    MoveDeclined,
    NotFound,
    Unsupported,
)

logger = logging.getLogger(__name__)

PARAM_CHARS_MAX = 200
MESSAGE_CHARS_MAX = 2000
"""What a client sent may come back in an error, but not megabytes of it."""

MODEL_NOT_FOUND = "model_not_found"
"""OpenAI's code for an unknown model; other things that aren't found keep the mesh's own code."""

UNSUPPORTED_FIELD = "unsupported_field"
"""The pydantic error type of a field that OpenAI knows and this server doesn't serve."""

_HTTP_CODES = {
    400: ErrorCode.INVALID_REQUEST.value,
    404: ErrorCode.NOT_FOUND.value,
    405: "method_not_allowed",
    408: ErrorCode.PEER_TIMEOUT.value,
    413: ErrorCode.MESSAGE_TOO_LARGE.value,
    415: "unsupported_media_type",
}


class ErrorBody(BaseModel):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorEnvelope(BaseModel):
    """The body of every response that isn't a success, and the `data` of an error in a stream."""

    error: ErrorBody


@dataclass(frozen=True, slots=True)
class HttpError:
    """A status with its body."""

    status: int
    body: ErrorBody
    headers: Mapping[str, str] = field(default_factory=dict)

    def envelope(self) -> ErrorEnvelope:
        """The body's outer object."""
        return ErrorEnvelope(error=self.body)

    def response(self) -> Response:
        """The whole response."""
        body = self.envelope().model_dump_json()
        return Response(body, self.status, headers=dict(self.headers), media_type="application/json")


def describe_error(error: BaseException, *, request_id: str, retry_after_s: int) -> HttpError:
    """What the client gets for an exception. Unexpected ones are logged, with the request id, and not shown."""
    if isinstance(error, ValidationError | RequestValidationError):
        error = first_violation(error)
    if isinstance(error, MeshError):
        return _describe_mesh_error(error, request_id, retry_after_s)
    if isinstance(error, HTTPException):
        message = f"{error.detail}"[:MESSAGE_CHARS_MAX]
        code = _HTTP_CODES.get(error.status_code, ErrorCode.INVALID_REQUEST.value)
        body = ErrorBody(message=message, type=_error_type(error.status_code), code=code)
        return HttpError(error.status_code, body, error.headers or {})
    logger.error("request %s met an unexpected error", request_id, exc_info=error)
    message = f"internal error; the server's log has it under request id {request_id}"
    return HttpError(500, ErrorBody(message=message, type=_error_type(500), code=ErrorCode.INTERNAL.value))


def _describe_mesh_error(error: MeshError, request_id: str, retry_after_s: int) -> HttpError:
    status = error.http_status
    if not isinstance(error, CallerError):
        is_bug = status == 500
        level = logging.ERROR if is_bug else logging.WARNING
        name, cause = type(error).__name__, error if is_bug else None
        logger.log(level, "request %s failed: %s: %s", request_id, name, error.message, exc_info=cause)
    headers = {"Retry-After": str(retry_after_s)} if status in (429, 503) else {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    body = ErrorBody(
        message=error.message[:MESSAGE_CHARS_MAX],
        type="invalid_request_error" if isinstance(error, CallerError) else _error_type(status),
        param=None if error.param is None else error.param[:PARAM_CHARS_MAX],
        code=_code(error),
    )
    return HttpError(status, body, headers)


def _code(error: MeshError) -> str:
    if isinstance(error, NotFound) and error.param == "model":
        return MODEL_NOT_FOUND
    return error.refusal if isinstance(error, MoveDeclined | LayoutDeclined) else error.code.value


def _error_type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 and status != 409 else "server_error"


def first_violation(error: ValidationError | RequestValidationError) -> MeshError:
    """The first thing that is wrong with a body, named by its dotted path, such as `messages.0.role`."""
    if isinstance(error, ValidationError):
        violation = error.errors(include_url=False, include_context=False, include_input=False)[0]
    else:
        violation = error.errors()[0]
    param = ".".join(str(step) for step in violation["loc"]) or None
    message = str(violation["msg"])
    if violation["type"] == "json_invalid":
        return InvalidRequest(f"the body is no valid JSON: {message.removeprefix('Invalid JSON: ')}")
    if violation["type"] == "extra_forbidden":
        message = "unknown field"
    kind = Unsupported if violation["type"] == UNSUPPORTED_FIELD else InvalidRequest
    shown = f"{param[:PARAM_CHARS_MAX]}: {message}" if param else message
    return kind(shown, param=param)
