"""The two forms that answers have: those of chat completions, and those of plain completions."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from meshift.services.frontend.http.choice import Piece, WholeAnswer
from meshift.services.frontend.http.schemas.answers import (
    AnswerMessage,
    CalledFunction,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ContentLogprob,
    TextChoice,
    TextCompletion,
    TextLogprobs,
    ToolCall,
    TopLogprob,
    Usage,
    compact,
)
from meshift.services.frontend.text.scores import TokenScore

CALL_ID_CHARS = 9
"""Mistral's chat templates accept call ids of this length only; to others it doesn't matter."""

TokenBytes = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class Head:
    """What all parts of an answer carry."""

    id: str
    created: int
    model: str


class AnswerForm(Protocol):
    """Writes answers. Pieces of a stream are the JSON objects of its events."""

    def opening(self, index: int) -> Mapping[str, object] | None:
        """Before the first piece of a choice."""

    def pieces(self, piece: Piece) -> list[Mapping[str, object]]:
        """A piece of the answer, and the end if it has one."""

    def envelope(self, head: Head) -> Mapping[str, object]:
        """What each event has around its choices."""

    def whole(self, head: Head, answers: Sequence[WholeAnswer], usage: Usage) -> bytes:
        """The body of an answer that isn't streamed."""


class ChatForm:
    """`chat.completion` and `chat.completion.chunk`."""

    def __init__(self, completion_id: str, token_bytes: TokenBytes, *, scores: bool) -> None:
        self._id = completion_id
        self._token_bytes = token_bytes
        self._has_scores = scores

    def opening(self, index: int) -> Mapping[str, object]:
        return _event_choice(index, {"role": "assistant", "content": ""})

    def pieces(self, piece: Piece) -> list[Mapping[str, object]]:
        choices = []
        if piece.text or piece.scores:
            scores = self._scores(piece.scores)
            logprobs = None if scores is None else scores.model_dump()
            choices.append(_event_choice(piece.index, {"content": piece.text}, logprobs))
        if piece.calls:
            calls = [{"index": place, **call.model_dump()} for place, call in enumerate(self._calls(piece))]
            choices.append(_event_choice(piece.index, {"tool_calls": calls}))
        if piece.finish is not None:
            choices.append(_event_choice(piece.index, {}, reason=piece.finish))
        return choices

    def envelope(self, head: Head) -> Mapping[str, object]:
        return {"id": head.id, "object": "chat.completion.chunk", "created": head.created, "model": head.model}

    def whole(self, head: Head, answers: Sequence[WholeAnswer], usage: Usage) -> bytes:
        choices = [
            ChatChoice(
                index=index,
                message=self._message(index, answer),
                logprobs=self._scores(answer.scores),
                finish_reason=answer.finish,
            )
            for index, answer in enumerate(answers)
        ]
        answer = ChatCompletion(id=head.id, created=head.created, model=head.model, choices=choices, usage=usage)
        return json.dumps(compact(answer), ensure_ascii=False, separators=(",", ":")).encode()

    def _message(self, index: int, answer: WholeAnswer) -> AnswerMessage:
        if not answer.calls:
            return AnswerMessage(content=answer.text)
        calls = self._calls(Piece(index, "", calls=answer.calls))
        return AnswerMessage(content=answer.text.strip() or None, tool_calls=calls)

    def _calls(self, piece: Piece) -> list[ToolCall]:
        return [
            ToolCall(
                id=_call_id(f"{self._id} {piece.index} {place}"),
                function=CalledFunction(name=call.name, arguments=call.arguments),
            )
            for place, call in enumerate(piece.calls)
        ]

    def _scores(self, scores: Sequence[TokenScore]) -> ChatLogprobs | None:
        if not self._has_scores:
            return None
        return ChatLogprobs(content=[self._score(score) for score in scores])

    def _score(self, score: TokenScore) -> ContentLogprob:
        top = [self._top(token, value) for token, value in score.logprob.top]
        own = self._top(score.token, score.logprob.value)
        return ContentLogprob(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=top)

    def _top(self, token: int, value: float) -> TopLogprob:
        raw = self._token_bytes(token)
        return TopLogprob(token=raw.decode(errors="replace"), logprob=finite(value), bytes=list(raw))


class TextForm:
    """`text_completion`."""

    def __init__(self, token_bytes: TokenBytes, *, scores: bool) -> None:
        self._token_bytes = token_bytes
        self._has_scores = scores

    def opening(self, index: int) -> None:
        """There is none."""

    def pieces(self, piece: Piece) -> list[Mapping[str, object]]:
        choices = []
        if piece.text or piece.scores:
            scores = self._scores(piece.scores)
            choices.append(_text_choice(piece.index, piece.text, None if scores is None else scores.model_dump()))
        if piece.finish is not None:
            choices.append(_text_choice(piece.index, "", reason=piece.finish))
        return choices

    def envelope(self, head: Head) -> Mapping[str, object]:
        return {"id": head.id, "object": "text_completion", "created": head.created, "model": head.model}

    def whole(self, head: Head, answers: Sequence[WholeAnswer], usage: Usage) -> bytes:
        choices = [
            TextChoice(
                index=index,
                text=answer.text,
                logprobs=self._scores(answer.scores),
                finish_reason="length" if answer.finish == "length" else "stop",
            )
            for index, answer in enumerate(answers)
        ]
        answer = TextCompletion(id=head.id, created=head.created, model=head.model, choices=choices, usage=usage)
        return answer.model_dump_json().encode()

    def _scores(self, scores: Sequence[TokenScore]) -> TextLogprobs | None:
        if not self._has_scores:
            return None
        return TextLogprobs(
            tokens=[self._name(score.token) for score in scores],
            token_logprobs=[finite(score.logprob.value) for score in scores],
            top_logprobs=[self._top(score) for score in scores],
            text_offset=[score.offset for score in scores],
        )

    def _top(self, score: TokenScore) -> dict[str, float]:
        pairs = (*score.logprob.top, (score.token, score.logprob.value))
        return {self._name(token): finite(value) for token, value in pairs}

    def _name(self, token: int) -> str:
        raw = self._token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


LOGPROB_MIN = -9999.0
"""Stands for minus infinity, which JSON can't say, as at OpenAI."""


def finite(value: float) -> float:
    """A log-probability as JSON may have it."""
    return max(value, LOGPROB_MIN)


def _call_id(seed: str) -> str:
    return hashlib.sha256(seed.encode()).hexdigest()[:CALL_ID_CHARS]


def _event_choice(
    index: int, delta: Mapping[str, object], logprobs: object = None, reason: str | None = None
) -> Mapping[str, object]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _text_choice(index: int, text: str, logprobs: Any = None, reason: str | None = None) -> Mapping[str, object]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
