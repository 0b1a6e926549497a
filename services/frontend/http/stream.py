"""Server-sent events of a completion."""

import json
from collections.abc import Mapping
from json.encoder import encode_basestring_ascii as quote
from typing import Final

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

_TEXT: Final = "\0text\0"
"""Stands for a piece's text; no server's model, and no request id, is called so."""


class StreamEvents:
    """The events of one stream: openings, pieces, usage if it was asked for."""

    def __init__(self, form: AnswerForm, head: Head, *, include_usage: bool) -> None:
        self._form = form
        self._envelope = form.envelope(head)
        self._include_usage = include_usage
        self._around: dict[int, tuple[str, str]] = {}
        """By choice: what stands before and behind the text in an event that has nothing else."""

    def opening(self, count: int) -> bytes:
        """The first events of `count` choices."""
        openings = (self._form.opening(index) for index in range(count))
        return b"".join(self._choice(choice) for choice in openings if choice is not None)

    def piece(self, piece: Piece) -> bytes:
        """A piece of a choice, and its end if it has one."""
        if piece.text and not (piece.scores or piece.calls) and piece.finish is None:
            # Nearly all are such, one a token.
            before, behind = self._around.get(piece.index) or self._plain(piece.index)
            return f"{before}{quote(piece.text)}{behind}".encode("ascii")
        return b"".join(self._choice(choice) for choice in self._form.pieces(piece))

    def usage(self, usage: Usage) -> bytes:
        """The counts, with no choice; nothing if they were not asked for."""
        if not self._include_usage:
            return b""
        return _event({**self._envelope, "choices": [], "usage": usage.model_dump()})

    def _plain(self, index: int) -> tuple[str, str]:
        [choice] = self._form.pieces(Piece(index, _TEXT))
        before, _, behind = self._choice(choice).decode("ascii").partition(quote(_TEXT))
        self._around[index] = before, behind
        return before, behind

    def _choice(self, choice: Mapping[str, object]) -> bytes:
        usage = {"usage": None} if self._include_usage else {}
        return _event({**self._envelope, "choices": [choice], **usage})


def error_event(error: HttpError) -> bytes:
    """The last event of a stream that fails; no `[DONE]` follows."""
    return _event(error.envelope().model_dump())


def _event(value: Mapping[str, object]) -> bytes:
    # ASCII only: many clients also break lines at U+2028 and its like.
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n".encode("ascii")
