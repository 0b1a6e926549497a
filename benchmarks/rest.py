"""A streaming chat, with the times at which its text came."""

import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class StreamedChat:
    """What a client got. Times of the monotonic clock."""

    begin_s: float = field(default_factory=time.monotonic)
    text: str = ""
    times_s: list[float] = field(default_factory=list)
    """Of every chunk with text."""
    finish_reason: str | None = None

    @property
    def first_text_s(self) -> float:
        """Seconds to the first text."""
        return self.times_s[0] - self.begin_s

    def pause_s_max(self, after_s: float) -> float:
        """The longest time between two chunks, of which the later came after `after_s`."""
        pairs = zip(self.times_s, self.times_s[1:], strict=False)
        return max((later - earlier for earlier, later in pairs if later > after_s), default=0.0)


async def stream_chat(rest: httpx.AsyncClient, body: dict[str, Any], into: StreamedChat | None = None) -> StreamedChat:
    """POST a chat and read its stream. Raises httpx.HTTPError, or RuntimeError with what the server said."""
    chat = into if into is not None else StreamedChat()
    chat.begin_s = time.monotonic()
    async with rest.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        if response.status_code != httpx.codes.OK:
            raise RuntimeError((await response.aread()).decode())
        async for line in response.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                _take(chat, json.loads(line.removeprefix("data: ")))
    return chat


def _take(chat: StreamedChat, chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        raise RuntimeError(chunk["error"]["message"])
    for choice in chunk["choices"]:
        text = choice["delta"].get("content")
        if text:
            chat.text += text
            chat.times_s.append(time.monotonic())
        chat.finish_reason = choice["finish_reason"] or chat.finish_reason
