"""Clients that go away."""

import asyncio
from collections.abc import Coroutine

from starlette.types import Message, Receive, Send

from meshift.schemas.errors import InternalError


class ClientGone(Exception):
    """The client has closed its connection, or takes no data any more. Nobody reads an answer."""


async def run_while_connected(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Run `work`, and cancel it at once when the client disconnects: then raises `ClientGone`, after `work` has cleaned
    up. The request's body must have been read. What `work` raises is raised here."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        left = not task.done()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
    if left and task.cancelled():
        raise ClientGone
    if task.cancelled():
        raise InternalError("the request was cancelled from inside")
    task.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class BoundedSend:
    """A send that doesn't wait for ever for a client that reads nothing: it raises `ClientGone`."""

    def __init__(self, send: Send, timeout_s: float) -> None:
        self._send = send
        self._timeout_s = timeout_s

    async def __call__(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send(message)
        except (TimeoutError, OSError) as error:
            raise ClientGone from error
