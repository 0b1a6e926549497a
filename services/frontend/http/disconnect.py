"""Clients that go away."""

import asyncio
from collections.abc import Coroutine
from typing import Any

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
    """A send that doesn't wait for ever for a client that reads nothing: it raises `ClientGone`.

    One timer watches all sends of an answer: one for each, and a stream has one a token, costs as much as the send.
    To be closed.
    """

    def __init__(self, send: Send, timeout_s: float) -> None:
        self._send = send
        self._timeout_s = timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._sender: asyncio.Task[Any] | None = None
        """Who sends now."""
        self._until_s = 0.0
        self._too_long = False

    async def __call__(self, message: Message) -> None:
        loop, sender = asyncio.get_running_loop(), asyncio.current_task()
        assert sender is not None, "ASGI applications run in tasks"
        self._until_s = loop.time() + self._timeout_s
        if self._timer is None:
            self._timer = loop.call_at(self._until_s, self._look)
        cancels, self._sender = sender.cancelling(), sender
        try:
            await self._send(message)
        except OSError as error:
            raise ClientGone from error
        except asyncio.CancelledError:
            # Somebody else's cancellation goes before this one's.
            if self._too_long and sender.uncancel() <= cancels:
                raise ClientGone from None
            raise
        finally:
            self._sender = None

    def close(self) -> None:
        """No send follows. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = None
        if self._sender is None:
            return
        loop = asyncio.get_running_loop()
        if loop.time() < self._until_s:
            self._timer = loop.call_at(self._until_s, self._look)
        else:
            self._too_long = True
            self._sender.cancel()
