"""What the HTTP tests share: an application over a fake core, clients, and scripts that say something."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from starlette.types import Message

from meshift.schemas.requests import Finish, FinishReason
from meshift.services.frontend.api import GenerateRequest
from meshift.services.frontend.http import Access, HttpSettings, create_app
from meshift.services.frontend.text.registry import TokenizerRegistry
from meshift.services.frontend.text.tokenizer import ChatTokenizer
from tests.unit.frontend.fake_frontend import STOPPED, Emit, FakeFrontend, Script, Step, model_info

WAIT_S = 30.0
"""No wait of these tests takes that long, unless it fails."""

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
CREATED = 1_700_000_000

HELLO: Mapping[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


@dataclass
class Shell:
    """An application with everything around it."""

    app: FastAPI
    frontend: FakeFrontend
    tokenizer: ChatTokenizer

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        transport = httpx.ASGITransport(app=self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shell", timeout=WAIT_S) as client:
            yield client

    async def post(self, body: object = HELLO, **headers: str) -> httpx.Response:
        """A chat request."""
        async with self.client() as client:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return await asyncio.wait_for(client.post(CHAT, json=body, headers=named), WAIT_S)

    async def post_text(self, **body: object) -> httpx.Response:
        """A plain completion request."""
        async with self.client() as client:
            return await asyncio.wait_for(client.post(TEXT, json={"model": "tiny", **body}), WAIT_S)

    async def get(self, path: str) -> httpx.Response:
        async with self.client() as client:
            return await asyncio.wait_for(client.get(path), WAIT_S)

    async def seen(self, *, requests: int = 0, streams: int = 0) -> None:
        """Wait until the core has seen so many."""
        await asyncio.wait_for(self.frontend.seen(requests=requests, streams=streams), WAIT_S)

    def say(self, text: str, *, size: int = 1, finish: Finish | None = None) -> list[Step]:
        """Steps that emit a text, `size` tokens at a time, and an end."""
        return emit(self.tokenizer.encode(text), size=size, finish=finish)

    def plays(self, *steps: Step, **script: Any) -> None:
        """Every request goes like this."""
        self.frontend.play = lambda _request: Script(steps, **script)


def emit(tokens: Sequence[int], *, size: int, finish: Finish | None) -> list[Step]:
    """Steps that emit tokens; the finish comes with the last of them."""
    starts = range(0, len(tokens), size)
    steps: list[Step] = [Emit(tokens[start : start + size]) for start in starts[:-1]]
    last = tokens[starts[-1] :] if tokens else ()
    return [*steps, Emit(last, finish or STOPPED)]


def ended(reason: FinishReason, **values: Any) -> Finish:
    """A finish."""
    return Finish(reason=reason, **values)


OPEN = Access(clients=None, admins=None)

MakeShell = Callable[..., Shell]


def make_shell(
    folder: Path,
    tokenizer: ChatTokenizer,
    *,
    frontend: FakeFrontend | None = None,
    access: Access = OPEN,
    **settings: Any,
) -> Shell:
    """An application whose model `tiny` has the tokeniser of `folder`, already loaded."""
    frontend = frontend or FakeFrontend([model_info(path=str(folder))])
    registry = TokenizerRegistry(load=lambda _folder: tokenizer)
    for model in frontend.models():
        registry.get(model)
    app = create_app(frontend, registry, HttpSettings(**settings), access=access, clock=lambda: CREATED + 0.5)
    return Shell(app, frontend, tokenizer)


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error object of a response, whose form is checked."""
    body = response.json()
    assert set(body) == {"error"}, body
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert response.headers["content-type"] == "application/json"
    return dict(body["error"])


def events_of(text: str) -> list[Any]:
    """The events of a stream; `[DONE]` as it is."""
    blocks = text.split("\n\n")
    assert blocks.pop() == "", "the last event must be complete"
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    data = [block.removeprefix("data: ") for block in blocks]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def text_of(events: Sequence[Any]) -> str:
    """The answer that a stream's events add up to."""
    choices = [choice for event in events if event != "[DONE]" for choice in event.get("choices", ())]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def choices_of(events: Sequence[Any], index: int) -> list[Any]:
    """What a stream's events say on one choice."""
    choices = [choice for event in events if event != "[DONE]" for choice in event["choices"]]
    return [choice for choice in choices if choice["index"] == index]


@dataclass
class Connection:
    """An ASGI connection driven by hand, which can be left at any time."""

    app: FastAPI
    body: bytes = field(default_factory=lambda: json.dumps({**HELLO, "stream": True}).encode())
    more_body: bool = False
    headers: Mapping[str, str] = field(default_factory=lambda: {"content-type": "application/json"})
    stuck: bool = False
    """The client reads nothing: no send returns."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    sent: "asyncio.Queue[Message]" = field(default_factory=asyncio.Queue)
    received: int = 0

    async def run(self) -> None:
        """The application's call for `POST /v1/chat/completions`."""
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": CHAT,
            "raw_path": CHAT.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode()) for name, value in self.headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        await self.app(scope, self._receive, self._send)

    async def next_body(self) -> str:
        """The next piece of the response's body."""
        while True:
            message = await asyncio.wait_for(self.sent.get(), WAIT_S)
            if message["type"] == "http.response.body":
                return bytes(message["body"]).decode()

    async def _receive(self) -> Message:
        self.received += 1
        if self.received == 1 or (self.more_body and not self.gone.is_set()):
            return {"type": "http.request", "body": self.body, "more_body": self.more_body}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self.stuck:
            await asyncio.Event().wait()
        self.sent.put_nowait(message)


def last_request(shell: Shell) -> GenerateRequest:
    """What the core got last."""
    return shell.frontend.requests[-1]
