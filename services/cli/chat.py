"""`meshift chat`: talk to a model through the REST API, as any client would."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
from pydantic import Field
from pydantic_settings import CliPositionalArg

from meshift.services.cli.errors import EXIT_ERROR, CommandError
from meshift.services.cli.find import RestClientSettings
from meshift.services.cli.settings import parse_settings

CONNECT_TIMEOUT_S = 5.0
SILENCE_MAX_S = 120.0
"""Between two pieces of an answer; a request that is moved or resumed pauses."""

Conversation = list[dict[str, str]]


class ChatSettings(RestClientSettings):
    """Talk to a model. With a message: ask once. Without: a conversation; Ctrl-C stops an answer, Ctrl-D leaves."""

    message: CliPositionalArg[str] = Field("", description="what to ask")
    model: str | None = Field(None, description="which model; without it, the first one served")
    system: str | None = Field(None, description="a system message to begin with")
    max_tokens: int = Field(512, ge=1, description="longest answer, in tokens")
    temperature: float = Field(0.7, ge=0, le=2, description="0 for the likeliest tokens")


def main(name: str, arguments: list[str]) -> int:
    """Ask once, or converse."""
    settings = parse_settings(ChatSettings, f"meshift {name}", arguments)
    conversation: Conversation = []
    if settings.system:
        conversation.append({"role": "system", "content": settings.system})
    try:
        chat = Chat(settings, conversation)
        return ask_once(chat, settings.message) if settings.message else converse(chat)
    except httpx.ConnectError as error:
        raise CommandError(f"no mesh answers at {settings.rest_url()}; `meshift up` starts one") from error
    except httpx.TimeoutException as error:
        raise CommandError(f"{settings.rest_url()} was silent for too long") from error
    except httpx.HTTPError as error:
        raise CommandError(f"the connection to {settings.rest_url()} broke: {error}") from error


class Chat:
    """A conversation with one model."""

    def __init__(self, settings: ChatSettings, conversation: Conversation) -> None:
        self._settings = settings
        self._conversation = conversation
        self._url = settings.rest_url()
        self._timeout = httpx.Timeout(SILENCE_MAX_S, connect=CONNECT_TIMEOUT_S)
        self.model = settings.model or self._first_model()

    def answer(self, message: str) -> None:
        """Send a message and print the answer as it comes. An answer that fails, or that is stopped, is forgotten
        together with its message."""
        self._conversation.append({"role": "user", "content": message})
        try:
            text = asyncio.run(self._print_answer())
        except BaseException:
            self._conversation.pop()
            raise
        self._conversation.append({"role": "assistant", "content": text})

    async def _print_answer(self) -> str:
        pieces = []
        async for piece in self._stream():
            pieces.append(piece)
            print(piece, end="", flush=True)
        print()
        return "".join(pieces)

    async def _stream(self) -> AsyncIterator[str]:
        body = {
            "model": self.model,
            "messages": self._conversation,
            "stream": True,
            "max_tokens": self._settings.max_tokens,
            "temperature": self._settings.temperature,
        }
        async with (
            httpx.AsyncClient(timeout=self._timeout) as client,
            client.stream("POST", f"{self._url}/v1/chat/completions", json=body) as response,
        ):
            if response.status_code != httpx.codes.OK:
                raise CommandError(refusal(response.status_code, await response.aread()))
            async for event in events(response.aiter_lines()):
                yield piece_of(event)

    def _first_model(self) -> str:
        response = httpx.get(f"{self._url}/v1/models", timeout=self._timeout)
        if response.status_code != httpx.codes.OK:
            raise CommandError(refusal(response.status_code, response.content))
        models = response.json()["data"]
        if not models:
            raise CommandError(f"{self._url} serves no model yet; see `meshift status`")
        return str(models[0]["id"])


async def events(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream, until `[DONE]`. Raises `CommandError` if it ends before."""
    async for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        yield json.loads(data)
    raise CommandError("the answer broke off")


def piece_of(event: dict[str, Any]) -> str:
    """The text in one event. Raises `CommandError` if it is an error."""
    if "error" in event:
        raise CommandError(str(event["error"].get("message", event["error"])))
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])


def refusal(status: int, body: bytes) -> str:
    """What the server said when it refused."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {status}: {body.decode(errors='replace')[:200]}"


def ask_once(chat: Chat, message: str) -> int:
    """Print one answer."""
    chat.answer(message)
    return 0


def converse(chat: Chat) -> int:
    """Read messages until the end of input. One that fails ends a script, but not a conversation."""
    interactive = sys.stdin.isatty()
    if interactive:
        print(f"{chat.model}; Ctrl-C stops an answer, Ctrl-D leaves")
    while True:
        try:
            message = input("> " if interactive else "").strip()
        except EOFError:
            return 0
        if message and not answered(chat, message) and not interactive:
            return EXIT_ERROR


def answered(chat: Chat, message: str) -> bool:
    """Print an answer; False, with the reason on the screen, if it failed or was stopped."""
    try:
        chat.answer(message)
    except CommandError as error:
        print(f"\n[{error}]", file=sys.stderr)
        return False
    except KeyboardInterrupt:
        print("\n[stopped]", file=sys.stderr)
        return False
    return True
