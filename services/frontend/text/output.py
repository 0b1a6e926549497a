"""The text of one output: chunks of tokens in, text and the end of it out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from meshift.schemas.errors import InternalError, Unavailable
from meshift.schemas.requests import Finish, FinishReason, TokenLogprob
from meshift.services.frontend.api import Chunk
from meshift.services.frontend.text.detokenizer import Detokenizer
from meshift.services.frontend.text.scores import ScoreQueue, TokenScore
from meshift.services.frontend.text.stop import StopFilter

TextFinish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What a chunk adds."""

    text: str
    finish: TextFinish | None = None
    scores: Sequence[TokenScore] = ()
    """Of the tokens whose text ends here, if they were asked for."""


class OutputText:
    """Detokenises and trims. `done` without `finished` means that the stream must be cancelled: a stop string was
    found here, and the engine goes on."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str], *, scores: bool = False) -> None:
        """`scores`: the chunks have log-probabilities, and the deltas shall have them."""
        self._detokenizer = detokenizer
        self._filter = StopFilter(stops)
        self._cuts = bool(stops)
        self._scores = ScoreQueue() if scores else None
        self._decoded = 0
        self._released = 0
        """Characters that came out of the detokeniser, and of the filter behind it."""
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
        """Raises `InternalError` if the chunk is not the next one or lacks log-probabilities, or the engine failed,
        `Unavailable` if the request was cancelled, though not by its client."""
        if chunk.start != self.token_count or self.done:
            raise InternalError(f"a chunk at token {chunk.start} came after {self.token_count} tokens")
        self.finished = chunk.finish is not None
        if chunk.finish is None:
            text = self._push(chunk.tokens, self._logprobs(chunk))
        else:
            self.cached_tokens = chunk.finish.cached_tokens
            _raise_failure(chunk.finish)
            text = self._push_last(chunk, chunk.finish)
        self._released += len(text)
        return TextDelta(text, self._finish(chunk.finish), self._take_scores())

    def _finish(self, finish: Finish | None) -> TextFinish | None:
        if self._filter.matched is not None:
            return "stop"
        if finish is None:
            return None
        return "length" if finish.reason is FinishReason.LENGTH else "stop"

    def _logprobs(self, chunk: Chunk) -> Sequence[TokenLogprob]:
        if self._scores is None:
            return ()
        logprobs = chunk.logprobs or ()
        if len(logprobs) != len(chunk.tokens):
            raise InternalError(f"{len(logprobs)} log-probabilities came with {len(chunk.tokens)} tokens")
        return logprobs

    def _take_scores(self) -> Sequence[TokenScore]:
        if self._scores is None:
            return ()
        if self.done:
            return self._scores.end(None if self._filter.matched is None else self._released)
        return self._scores.take(self._released)

    def _push(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> str:
        if not self._cuts and self._scores is None:
            self.token_count += len(tokens)
            return self._detokenizer.push(tokens)
        # One by one, so that the count is exact when a stop string ends in the middle of a chunk.
        text = ""
        for index, token in enumerate(tokens):
            self.token_count += 1
            text += self._filter.push(self._decode(token, logprobs[index] if logprobs else None))
            if self._filter.matched is not None:
                break
        return text

    def _decode(self, token: int, logprob: TokenLogprob | None) -> str:
        text, begin = self._detokenizer.push((token,)), self._decoded
        self._decoded += len(text)
        if self._scores is not None and logprob is not None:
            self._scores.push(TokenScore(token, logprob, begin), self._decoded)
        return text

    def _push_last(self, chunk: Chunk, finish: Finish) -> str:
        tokens, logprobs = chunk.tokens, self._logprobs(chunk)
        stop_token = finish.matched_stop if finish.reason is FinishReason.STOP else None
        silent = 1 if tokens and type(stop_token) is int and tokens[-1] == stop_token else 0
        text = self._push(tokens[: len(tokens) - silent], logprobs[: len(tokens) - silent])
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
