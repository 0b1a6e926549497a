"""Events of a stream: those that are put together from a form's own words are the ones that it would have written."""

import json

import pytest

from meshift.services.frontend.http.choice import Piece
from meshift.services.frontend.http.forms import AnswerForm, ChatForm, Head, TextForm
from meshift.services.frontend.http.stream import StreamEvents

HEAD = Head("chatcmpl-1", 1, 'a "model"\u2028')
TEXTS = ("x", " ", '"}\\', "\0", "\0text\0", "\n\n", "\u2028é\ud83d", "🦊", "data: [DONE]")


def _bytes(_: int) -> bytes:
    return b""


FORMS: list[AnswerForm] = [
    ChatForm("id", _bytes, scores=False),
    ChatForm("id", _bytes, scores=True),
    TextForm(_bytes, scores=False),
    TextForm(_bytes, scores=True),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("include_usage", [False, True])
def test_plain_pieces_are_as_their_form_writes_them(form: AnswerForm, include_usage: bool) -> None:
    events = StreamEvents(form, HEAD, include_usage=include_usage)
    for index in (1, 0, 1):
        for text in TEXTS:
            piece = Piece(index, text)
            [choice] = form.pieces(piece)
            expected = {**form.envelope(HEAD), "choices": [choice]}
            if include_usage:
                expected["usage"] = None
            data = events.piece(piece)
            assert data.startswith(b"data: ")
            assert data.endswith(b"\n\n")
            assert data.count(b"\n") == 2
            assert json.loads(data[len("data: ") :]) == expected
            assert list(json.loads(data[len("data: ") :])) == list(expected)


def test_a_piece_without_anything_is_no_event() -> None:
    assert StreamEvents(FORMS[0], HEAD, include_usage=False).piece(Piece(0, "")) == b""
