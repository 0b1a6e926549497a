"""One chat completion, from the core's stream to the client's connection."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from meshift.schemas.errors import InternalError, MeshError, NotFound
from meshift.services.frontend.api import Frontend, GenerateRequest, TokenStream
from meshift.services.frontend.http import stream
from meshift.services.frontend.http.disconnect import BoundedSend, ClientGone, run_while_connected
from meshift.services.frontend.http.errors import HttpError
from meshift.services.frontend.http.schemas import AnswerMessage, ChatCompletion, Choice, Usage
from meshift.services.frontend.text.output import OutputText, TextDelta

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Completion:
    """A request that is ready for the core, and how its answer is wanted."""

    request: GenerateRequest
    output: OutputText
    created: int
    streams: bool
    include_usage: bool

    def usage(self) -> Usage:
        """The counts so far."""
        prompt = len(self.request.prompt)
        output = self.output
        return Usage.of(prompt=prompt, completion=output.token_count, cached=output.cached_tokens)


@dataclass(frozen=True, slots=True)
class CompletionBounds:
    """What a completion may take of its connection's task."""

    send_timeout_s: float
    cancel_timeout_s: float


class CompletionResponse(Response):
    """Submits the request, then answers. The request is submitted here and not before, so that from its first moment it
    is cancelled when the client goes away; nothing is sent before the core has taken it, so that a refusal keeps its
    status."""

    def __init__(
        self,
        completion: Completion,
        frontend: Frontend,
        bounds: CompletionBounds,
        *,
        describe: Callable[[BaseException], HttpError],
        on_end: Callable[[], None],
    ) -> None:
        """`on_end` is called once, when the completion is over, however it ends."""
        super().__init__()
        self._completion = completion
        self._frontend = frontend
        self._bounds = bounds
        self._describe = describe
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        bounded = BoundedSend(send, self._bounds.send_timeout_s)
        try:
            await run_while_connected(receive, self._run(scope, receive, bounded))
        finally:
            self._on_end()

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        tokens = await self._submit()
        try:
            if self._completion.streams:
                await self._send_events(tokens, send)
            else:
                body = (await self._collect(tokens)).model_dump_json()
                await Response(body, media_type="application/json")(scope, receive, send)
        finally:
            if not self._completion.output.finished:
                await self._cancel(tokens)

    async def _submit(self) -> TokenStream:
        try:
            return await self._frontend.generate(self._completion.request)
        except NotFound as error:
            raise NotFound(error.message, param="model") from error

    async def _cancel(self, tokens: TokenStream) -> None:
        request_id = self._completion.request.request_id
        try:
            async with asyncio.timeout(self._bounds.cancel_timeout_s):
                await tokens.cancel()
        except (TimeoutError, MeshError) as error:
            # The answer is what counts here; the owner's lease frees the memory in the end.
            logger.warning("request %s could not be cancelled: %r", request_id, error)

    async def _deltas(self, tokens: TokenStream) -> AsyncGenerator[TextDelta, None]:
        """Ends after the finish; a stream that ends without one raises `InternalError`."""
        async for chunk in tokens:
            delta = self._completion.output.feed(chunk)
            yield delta
            if delta.finish is not None:
                return
        raise InternalError("the token stream ended without a finish")

    async def _collect(self, tokens: TokenStream) -> ChatCompletion:
        request = self._completion.request
        texts: list[str] = []
        async with aclosing(self._deltas(tokens)) as deltas:
            async for delta in deltas:
                texts.append(delta.text)
                if delta.finish is not None:
                    choice = Choice(message=AnswerMessage(content="".join(texts)), finish_reason=delta.finish)
        return ChatCompletion(
            id=request.request_id,
            created=self._completion.created,
            model=request.model,
            choices=[choice],
            usage=self._completion.usage(),
        )

    async def _send_events(self, tokens: TokenStream, send: Send) -> None:
        headers = [(name.lower().encode(), value.encode()) for name, value in stream.HEADERS.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            await self._send_chunks(tokens, send)
        except ClientGone:
            raise
        except Exception as error:
            await _send_body(send, stream.error_event(self._describe(error)))
        await _send_body(send, b"", more=False)

    async def _send_chunks(self, tokens: TokenStream, send: Send) -> None:
        completion = self._completion
        events = stream.ChunkEvents(
            completion_id=completion.request.request_id,
            created=completion.created,
            model=completion.request.model,
            include_usage=completion.include_usage,
        )
        await _send_body(send, events.role())
        async with aclosing(self._deltas(tokens)) as deltas:
            async for delta in deltas:
                if delta.text:
                    await _send_body(send, events.content(delta.text))
                if delta.finish is not None:
                    end = events.finish(delta.finish) + events.usage(completion.usage()) + stream.DONE
                    await _send_body(send, end)


async def _send_body(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
