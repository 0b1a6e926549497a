"""Server-sent events of a chat completion."""

import json
from collections.abc import Mapping

from meshift.services.frontend.http.errors import HttpError
from meshift.services.frontend.http.schemas import Usage
from meshift.services.frontend.text.output import TextFinish

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # asks nginx to pass events on at once
}

DONE = b"data: [DONE]\n\n"


class ChunkEvents:
    """The events of one stream: role, content..., finish, usage if it was asked for."""

    def __init__(self, *, completion_id: str, created: int, model: str, include_usage: bool) -> None:
        self._head = {"id": completion_id, "object": "chat.completion.chunk", "created": created, "model": model}
        self._include_usage = include_usage

    def role(self) -> bytes:
        """The first event."""
        return self._choice({"role": "assistant", "content": ""})

    def content(self, text: str) -> bytes:
        """A piece of the answer."""
        return self._choice({"content": text})

    def finish(self, reason: TextFinish) -> bytes:
        """Why it ends."""
        return self._choice({}, reason)

    def usage(self, usage: Usage) -> bytes:
        """The counts, with no choice; nothing if they were not asked for."""
        if not self._include_usage:
            return b""
        return _event({**self._head, "choices": [], "usage": usage.model_dump()})

    def _choice(self, delta: Mapping[str, str], reason: TextFinish | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        usage = {"usage": None} if self._include_usage else {}
        return _event({**self._head, "choices": [choice], **usage})


def error_event(error: HttpError) -> bytes:
    """The last event of a stream that fails; no `[DONE]` follows."""
    return _event(error.envelope().model_dump())


def _event(value: Mapping[str, object]) -> bytes:
    # ASCII only: many clients also break lines at U+2028 and its like.
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n".encode("ascii")
