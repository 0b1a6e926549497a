"""Requests that wait for their answers: a bounded table with a deadline for each."""

import asyncio
from typing import Generic, NamedTuple, TypeVar

from meshift.schemas.errors import BusClosed, MeshError, Overloaded, PeerGone, PeerTimeout

AnswerT = TypeVar("AnswerT")


class _Entry(NamedTuple, Generic[AnswerT]):
    subject: str
    future: asyncio.Future[AnswerT]
    timer: asyncio.TimerHandle


class PendingRequests(Generic[AnswerT]):
    """The table of one bus client. Answers that come too late, or twice, find no entry and are ignored.

    Deadlines are bare timer handles: a task or `asyncio.wait_for` for each would cost more than the request.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._next_token = 0
        self._entries: dict[int, _Entry[AnswerT]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, token: int) -> bool:
        return token in self._entries

    def open(self, subject: str, timeout_s: float) -> tuple[int, asyncio.Future[AnswerT]]:
        """A new entry: its token, and the future of its answer. Raises `Overloaded`."""
        if len(self._entries) >= self._limit:
            raise Overloaded(f"{self._limit} requests of this bus client wait for answers")
        loop = asyncio.get_running_loop()
        self._next_token += 1
        token = self._next_token
        future: asyncio.Future[AnswerT] = loop.create_future()
        timer = loop.call_later(timeout_s, self._expire, token, timeout_s)
        self._entries[token] = _Entry(subject, future, timer)
        return token, future

    def resolve(self, token: int, answer: AnswerT) -> None:
        """The answer has come."""
        entry = self._entries.get(token)
        if entry is not None and not entry.future.done():
            entry.future.set_result(answer)

    def fail(self, token: int, error: MeshError) -> None:
        """There will be no answer."""
        entry = self._entries.get(token)
        if entry is not None and not entry.future.done():
            entry.future.set_exception(error)

    def discard(self, token: int) -> None:
        """The caller doesn't wait any more, whatever the reason."""
        entry = self._entries.pop(token, None)
        if entry is not None:
            entry.timer.cancel()
            entry.future.cancel()

    def close(self) -> None:
        """All that wait get `BusClosed`."""
        for token in list(self._entries):
            self.fail(token, BusClosed("the bus client was closed while the request waited"))

    def gone(self, token: int) -> None:
        """Nobody serves the subject."""
        entry = self._entries.get(token)
        if entry is not None:
            self.fail(token, PeerGone(f"nobody serves {entry.subject}"))

    def _expire(self, token: int, timeout_s: float) -> None:
        self.fail(token, PeerTimeout(f"no answer from {self._entries[token].subject} within {timeout_s} s"))
