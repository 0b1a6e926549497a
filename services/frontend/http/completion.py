"""One completion with all its choices, from the core's streams to the client's connection."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from meshift.schemas.errors import MeshError, NotFound
from meshift.services.frontend.api import Frontend, TokenStream
from meshift.services.frontend.http import stream
from meshift.services.frontend.http.choice import Choice, Piece, WholeAnswer
from meshift.services.frontend.http.disconnect import BoundedSend, ClientGone, run_while_connected
from meshift.services.frontend.http.errors import HttpError
from meshift.services.frontend.http.forms import AnswerForm, Head
from meshift.services.frontend.http.merge import merge
from meshift.services.frontend.http.schemas import Usage

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Completion:
    """Requests that are ready for the core, and how their answers are wanted."""

    head: Head
    form: AnswerForm
    choices: Sequence[Choice]
    """By index; those to one prompt follow one another."""
    choices_per_prompt: int
    streams: bool
    include_usage: bool

    def usage(self) -> Usage:
        """The counts so far. A prompt counts once, however many answers it has."""
        prompts = self.choices[:: self.choices_per_prompt]
        return Usage.of(
            prompt=sum(len(choice.request.prompt) for choice in prompts),
            completion=sum(choice.output.token_count for choice in self.choices),
            cached=sum(choice.output.cached_tokens for choice in prompts),
        )


@dataclass(frozen=True, slots=True)
class CompletionBounds:
    """What a completion may take of its connection's task."""

    send_timeout_s: float
    cancel_timeout_s: float


class CompletionResponse(Response):
    """Submits the requests, then answers. They are submitted here and not before, so that from their first moment they
    are cancelled when the client goes away; nothing is sent before the core has taken all, so that a refusal keeps its
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
        self._streams: list[TokenStream | None] = [None] * len(completion.choices)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        bounded = BoundedSend(send, self._bounds.send_timeout_s)
        try:
            await run_while_connected(receive, self._run(scope, receive, bounded))
        finally:
            bounded.close()
            self._on_end()

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._submit()
            if self._completion.streams:
                await self._send_events(send)
            else:
                body = await self._collect()
                await Response(body, media_type="application/json")(scope, receive, send)
        finally:
            await self._cancel_rest()

    async def _submit(self) -> None:
        """Submit all, at once. Raises the first refusal."""
        choices = self._completion.choices
        if len(choices) == 1:
            await self._submit_one(choices[0])
            return
        tasks = [asyncio.ensure_future(self._submit_one(choice)) for choice in choices]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _submit_one(self, choice: Choice) -> None:
        try:
            self._streams[choice.index] = await self._frontend.generate(choice.request)
        except NotFound as error:
            raise NotFound(error.message, param="model") from error

    async def _cancel_rest(self) -> None:
        """Cancel what was submitted and hasn't finished."""
        open_streams = [
            (choice, tokens)
            for choice, tokens in zip(self._completion.choices, self._streams, strict=True)
            if tokens is not None and not choice.output.finished
        ]
        if open_streams:
            await asyncio.gather(*(self._cancel(choice, tokens) for choice, tokens in open_streams))

    async def _cancel(self, choice: Choice, tokens: TokenStream) -> None:
        try:
            async with asyncio.timeout(self._bounds.cancel_timeout_s):
                await tokens.cancel()
        except (TimeoutError, MeshError) as error:
            # The answer is what counts here; the owner's lease frees the memory in the end.
            logger.warning("request %s could not be cancelled: %r", choice.request.request_id, error)

    def _pieces(self) -> AsyncGenerator[Piece, None]:
        pairs = zip(self._completion.choices, self._streams, strict=True)
        return merge([self._pieces_of(choice, tokens) for choice, tokens in pairs if tokens is not None])

    async def _pieces_of(self, choice: Choice, tokens: TokenStream) -> AsyncGenerator[Piece, None]:
        async with aclosing(choice.pieces(tokens)) as pieces:
            async for piece in pieces:
                if piece.finish is not None and not choice.output.finished:
                    # Its text is complete here; its owner need not go on while the other choices do.
                    self._streams[choice.index] = None
                    await self._cancel(choice, tokens)
                yield piece

    async def _collect(self) -> bytes:
        completion = self._completion
        collected: list[list[Piece]] = [[] for _ in completion.choices]
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                collected[piece.index].append(piece)
        answers = [WholeAnswer.of(pieces) for pieces in collected]
        return completion.form.whole(completion.head, answers, completion.usage())

    async def _send_events(self, send: Send) -> None:
        headers = [(name.lower().encode(), value.encode()) for name, value in stream.HEADERS.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            await self._send_pieces(send)
        except ClientGone:
            raise
        except Exception as error:
            await _send_body(send, stream.error_event(self._describe(error)))
        await _send_body(send, b"", more=False)

    async def _send_pieces(self, send: Send) -> None:
        completion = self._completion
        events = stream.StreamEvents(completion.form, completion.head, include_usage=completion.include_usage)
        opening = events.opening(len(completion.choices))
        if opening:
            await _send_body(send, opening)
        left = len(completion.choices)
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                data = events.piece(piece)
                left -= piece.finish is not None
                if left == 0:
                    data += events.usage(completion.usage()) + stream.DONE
                if data:
                    await _send_body(send, data)


async def _send_body(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
