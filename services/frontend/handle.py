"""The reader's end of a stream."""

import asyncio
from collections.abc import AsyncIterator, Callable

from meshift.schemas.errors import InternalError
from meshift.services.frontend.api import Chunk
from meshift.services.frontend.streams import Stream, StreamState


class StreamHandle:
    """Implements `api.TokenStream` for one reader. What it holds is bounded by the request's `max_new_tokens`."""

    def __init__(self, stream: Stream, cancel: Callable[[Stream], None]) -> None:
        self._stream = stream
        self._cancel = cancel
        self._read = 0
        self._over = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def stream(self) -> Stream:
        """The state behind it."""
        return self._stream

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        while not self._over:
            chunk = self._next_chunk()
            if chunk is not None:
                return chunk
            await self._wait()
        raise StopAsyncIteration

    async def cancel(self) -> None:
        """See `api.TokenStream.cancel`."""
        self._cancel(self._stream)

    def wake(self) -> None:
        """Something can be read."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _next_chunk(self) -> Chunk | None:
        stream, start = self._stream, self._read
        if start < len(stream.output) or stream.finish is not None:
            self._read = len(stream.output)
            self._over = stream.finish is not None
            logprobs = None if stream.logprobs is None else stream.logprobs[start:]
            return Chunk(start, stream.output[start:], stream.finish, logprobs)
        if stream.error is not None:
            self._over = True
            raise stream.error
        if stream.state is StreamState.CANCELLED:
            self._over = True
            raise StopAsyncIteration
        return None

    async def _wait(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            raise InternalError("a stream has one reader")
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter
