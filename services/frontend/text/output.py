"""The text of one output: chunks of tokens in, text and the end of it out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from meshift.schemas.errors import InternalError, Unavailable
from meshift.schemas.requests import Finish, FinishReason
from meshift.services.frontend.api import Chunk
from meshift.services.frontend.text.detokenizer import Detokenizer
from meshift.services.frontend.text.stop import StopFilter

TextFinish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What a chunk adds."""

    text: str
    finish: TextFinish | None = None


class OutputText:
    """Detokenises and trims. `done` without `finished` means that the stream must be cancelled: a stop string was
    found here, and the engine goes on."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._filter = StopFilter(stops)
        self._cuts = bool(stops)
        self.token_count = 0
        """Output tokens so far; those behind a stop string don't count, an end-of-sequence token does."""
        self.cached_tokens = 0
        """Prompt tokens that came from the prefix cache; known at the finish."""
        self.finished = False
        """The finish has come."""

    @property
    def done(self) -> bool:
        """No text follows."""
        return self.finished or self._filter.matched is not None

    def feed(self, chunk: Chunk) -> TextDelta:
        """Raises `InternalError` if the chunk is not the next one or the engine failed, `Unavailable` if the request
        was cancelled, though not by its client."""
        if chunk.start != self.token_count or self.done:
            raise InternalError(f"a chunk at token {chunk.start} came after {self.token_count} tokens")
        self.finished = chunk.finish is not None
        if chunk.finish is None:
            text = self._push(chunk.tokens)
        else:
            self.cached_tokens = chunk.finish.cached_tokens
            _raise_failure(chunk.finish)
            text = self._push_last(chunk.tokens, chunk.finish)
        if self._filter.matched is not None:
            return TextDelta(text, "stop")
        if chunk.finish is None:
            return TextDelta(text)
        return TextDelta(text, "length" if chunk.finish.reason is FinishReason.LENGTH else "stop")

    def _push(self, tokens: Sequence[int]) -> str:
        if not self._cuts:
            self.token_count += len(tokens)
            return self._detokenizer.push(tokens)
        # One by one, so that the count is exact when a stop string ends in the middle of a chunk.
        text = ""
        for token in tokens:
            self.token_count += 1
            text += self._filter.push(self._detokenizer.push((token,)))
            if self._filter.matched is not None:
                break
        return text

    def _push_last(self, tokens: Sequence[int], finish: Finish) -> str:
        stop_token = finish.matched_stop if finish.reason is FinishReason.STOP else None
        silent = 1 if tokens and type(stop_token) is int and tokens[-1] == stop_token else 0
        text = self._push(tokens[: len(tokens) - silent])
        if self._filter.matched is None:
            self.token_count += silent
            text += self._filter.push(self._detokenizer.flush())
            text += self._filter.flush()
        return text


def _raise_failure(finish: Finish) -> None:
    if finish.reason is FinishReason.ERROR:
        raise InternalError(f"the engine failed this request: {finish.message or 'no reason given'}")
    if finish.reason is FinishReason.CANCELLED:
        raise Unavailable("the request was cancelled by the server")
