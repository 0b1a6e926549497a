"""Server-sent events of a completion."""

import json
from collections.abc import Mapping

from meshift.services.frontend.http.choice import Piece
from meshift.services.frontend.http.errors import HttpError
from meshift.services.frontend.http.forms import AnswerForm, Head
from meshift.services.frontend.http.schemas import Usage

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # asks nginx to pass events on at once
}

DONE = b"data: [DONE]\n\n"


class StreamEvents:
    """The events of one stream: openings, pieces, usage if it was asked for."""

    def __init__(self, form: AnswerForm, head: Head, *, include_usage: bool) -> None:
        self._form = form
        self._envelope = form.envelope(head)
        self._include_usage = include_usage

    def opening(self, count: int) -> bytes:
        """The first events of `count` choices."""
        openings = (self._form.opening(index) for index in range(count))
        return b"".join(self._choice(choice) for choice in openings if choice is not None)

    def piece(self, piece: Piece) -> bytes:
        """A piece of a choice, and its end if it has one."""
        return b"".join(self._choice(choice) for choice in self._form.pieces(piece))

    def usage(self, usage: Usage) -> bytes:
        """The counts, with no choice; nothing if they were not asked for."""
        if not self._include_usage:
            return b""
        return _event({**self._envelope, "choices": [], "usage": usage.model_dump()})

    def _choice(self, choice: Mapping[str, object]) -> bytes:
        usage = {"usage": None} if self._include_usage else {}
        return _event({**self._envelope, "choices": [choice], **usage})


def error_event(error: HttpError) -> bytes:
    """The last event of a stream that fails; no `[DONE]` follows."""
    return _event(error.envelope().model_dump())


def _event(value: Mapping[str, object]) -> bytes:
    # ASCII only: many clients also break lines at U+2028 and its like.
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n".encode("ascii")
