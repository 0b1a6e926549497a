"""Log-probabilities that stay with their text, though text is held back and cut at stop strings."""

from collections import deque
from dataclasses import dataclass

from meshift.schemas.requests import TokenLogprob


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token of the output, and where its text begins in the answer, in characters."""

    token: int
    logprob: TokenLogprob
    offset: int


class ScoreQueue:
    """Holds the score of a token until the text that the token ends in has been let through.

    A token without text of its own (some bytes of a character) belongs to the text that follows.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[TokenScore, int]] = deque()

    def push(self, score: TokenScore, end: int) -> None:
        """The next token; its text is [score.offset, end)."""
        self._waiting.append((score, end))

    def take(self, length: int) -> list[TokenScore]:
        """Those whose text is part of the first `length` characters."""
        taken = []
        while self._waiting:
            score, end = self._waiting[0]
            if end > length or (score.offset == end == length):
                break
            taken.append(score)
            self._waiting.popleft()
        return taken

    def end(self, length: int | None) -> list[TokenScore]:
        """The rest. If the answer was cut at `length`: only those that have begun before."""
        taken = [score for score, _ in self._waiting if length is None or score.offset < length]
        self._waiting.clear()
        return taken
