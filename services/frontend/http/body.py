"""Reading a JSON body within bounds."""

import asyncio
import contextlib
import re
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from meshift.schemas.errors import MessageTooLarge
from meshift.services.frontend.http.disconnect import ClientGone
from meshift.services.frontend.http.errors import first_violation

INLINE_BYTES_MAX = 64 * 1024
"""Bodies up to this size are parsed on the event loop, which takes 10 ms at worst, larger ones in a thread."""

BodyT = TypeVar("BodyT", bound=BaseModel)

_JSON_TYPE = re.compile(r"application/(?:[\w.+-]+\+)?json", re.IGNORECASE)


class BodyTooLarge(MessageTooLarge):
    """The client's body. Part of it is still on its way."""


async def read_body(request: Request, *, bytes_max: int, timeout_s: float) -> bytes:
    """The body. Raises `BodyTooLarge` as soon as it is known to be too long, HTTPException 415 if it is not said to
    be JSON (what a foreign web page may post without being asked is not) and 408 if it doesn't end in time, and
    `ClientGone`."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip()
    if not _JSON_TYPE.fullmatch(content_type):
        raise HTTPException(415, "the content type must be application/json")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > bytes_max:
        raise _too_large(bytes_max)
    try:
        async with asyncio.timeout(timeout_s):
            return await _collect(request, bytes_max)
    except TimeoutError:
        raise HTTPException(408, "the body did not arrive in time", {"Connection": "close"}) from None
    except ClientDisconnect:
        raise ClientGone from None


async def _collect(request: Request, bytes_max: int) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > bytes_max:
            raise _too_large(bytes_max)
    return bytes(body)


def _too_large(bytes_max: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {bytes_max} bytes")


class DrainingResponse(Response):
    """Answers at once, throws away what the client still sends, within bounds, then closes the connection. Closed while
    there are bytes that nobody has read, it would be reset, and the client might never see the answer."""

    def __init__(self, answer: Response, *, bytes_max: int, timeout_s: float) -> None:
        super().__init__(answer.body, answer.status_code, dict(answer.headers))
        self.headers["Connection"] = "close"
        self._bytes_max = bytes_max
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": bytes(self.body), "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                await self._drain(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _drain(self, receive: Receive) -> None:
        left, more = self._bytes_max, True
        while more and left > 0:
            message = await receive()
            left -= len(message.get("body", b""))
            more = bool(message.get("more_body", False))


def parse_body(kind: type[BodyT], body: bytes) -> BodyT:
    """The request in a body. Raises `InvalidRequest` or `Unsupported`, naming the field."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise first_violation(error) from error
