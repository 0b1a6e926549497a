"""The outermost layer: request ids, and the last resort for errors."""

import asyncio
import logging
import re
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshift.schemas.errors import InvalidRequest, Unavailable
from meshift.services.frontend.http.disconnect import ClientGone
from meshift.services.frontend.http.errors import describe_error

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "X-Request-Id"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")


class Boundary:
    """Gives each request an id, returns it in the response's header, and turns what nobody has caught into an answer.

    `scope["state"]["request_id"]` is what the core gets: unique, though a client may send one `X-Request-Id` twice.
    """

    def __init__(self, app: ASGIApp, *, new_id: Callable[[], str], retry_after_s: int) -> None:
        self._app = app
        self._new_id = new_id
        self._retry_after_s = retry_after_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent_id = Headers(scope=scope).get(REQUEST_ID_HEADER)
        valid_id = sent_id if sent_id is not None and _REQUEST_ID.fullmatch(sent_id) else None
        request_id = f"{valid_id or 'chatcmpl'}-{self._new_id()}"
        scope.setdefault("state", {})["request_id"] = request_id
        tagged = _TaggedSend(send, valid_id or request_id)
        try:
            if sent_id is not None and valid_id is None:
                raise InvalidRequest("must be 1 to 64 letters, digits, '.', '_', ':' or '-'", param=REQUEST_ID_HEADER)
            await self._app(scope, receive, tagged)
        except ClientGone:
            logger.info("request %s was left by its client", request_id)
        except asyncio.CancelledError:
            if not tagged.started:
                await self._answer(Unavailable("this frontend is shutting down"), request_id)(scope, receive, tagged)
            raise
        except Exception as error:
            answer = self._answer(error, request_id)
            if tagged.started:
                raise  # the server closes the connection, which is all that can still be said
            await answer(scope, receive, tagged)

    def _answer(self, error: Exception, request_id: str) -> Response:
        return describe_error(error, request_id=request_id, retry_after_s=self._retry_after_s).response()


class _TaggedSend:
    """Adds the header."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id
        self.started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            MutableHeaders(scope=message).append(REQUEST_ID_HEADER, self._request_id)
        await self._send(message)
