"""`meshift chat`: talk to a model through the REST API, as any client would."""

import asyncio
import sys
from contextlib import aclosing

from pydantic import Field
from pydantic_settings import CliPositionalArg

from meshift.client.mesh import MeshClient
from meshift.services.cli.errors import EXIT_ERROR, CommandError
from meshift.services.cli.find import RestClientSettings, told_errors
from meshift.services.cli.settings import parse_settings

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
    chat = Chat(settings, conversation)
    return ask_once(chat, settings.message) if settings.message else converse(chat)


class Chat:
    """A conversation with one model."""

    def __init__(self, settings: ChatSettings, conversation: Conversation) -> None:
        self._settings = settings
        self._conversation = conversation
        self.model = settings.model or asyncio.run(self._first_model())

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
        settings, pieces = self._settings, []
        with told_errors(settings.rest_url()):
            async with self._client() as mesh:
                options = {"max_tokens": settings.max_tokens, "temperature": settings.temperature}
                async with aclosing(mesh.stream_chat(self.model, self._conversation, **options)) as events:
                    async for event in events:
                        pieces.append(event.text)
                        print(event.text, end="", flush=True)
        print()
        return "".join(pieces)

    async def _first_model(self) -> str:
        url = self._settings.rest_url()
        with told_errors(url):
            async with self._client() as mesh:
                models = await mesh.models()
        if not models:
            raise CommandError(f"{url} serves no model yet; see `meshift status`")
        return models[0].id

    def _client(self) -> MeshClient:
        return MeshClient(self._settings.rest_url(), api_key=self._settings.client_key())


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
