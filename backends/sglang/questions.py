"""What the worker has asked all ranks, and who hasn't answered yet."""

import asyncio
import itertools
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from meshift.backends.base import MoveRefused, Refusal
from meshift.backends.sglang import wire, wire_moves

A = TypeVar("A")
OnFirst = Callable[[wire.Answer], None]


class RanksDiffer(Exception):
    """Ranks took different decisions at one point of the stream, or none: the instance can't be trusted any more."""


class Question:
    """One, to be answered once by every rank."""

    def __init__(self, nonce: int, ranks: int, on_lead: OnFirst | None) -> None:
        self.nonce = nonce
        self._ranks = ranks
        self._on_lead = on_lead
        self._answers: dict[int, wire.Answer] = {}
        self._complete: asyncio.Future[list[wire.Answer]] = asyncio.get_running_loop().create_future()

    async def answers(self, timeout_s: float) -> list[wire.Answer]:
        """All of them, in rank order. Raises TimeoutError, or ConnectionError when the ranks are lost."""
        return await asyncio.wait_for(asyncio.shield(self._complete), timeout_s)

    def note(self, answer: wire.Answer) -> None:
        """A rank has answered."""
        if self._complete.done():
            return
        self._answers[answer.rank] = answer
        if answer.rank == 0 and self._on_lead is not None:
            self._on_lead(answer)
        if len(self._answers) == self._ranks:
            self._complete.set_result([self._answers[rank] for rank in sorted(self._answers)])

    def abandon(self, reason: str) -> None:
        """No answer will come."""
        if not self._complete.done():
            self._complete.set_exception(ConnectionError(reason))
            # Perhaps nobody waits for it.
            self._complete.exception()


class Questions:
    """Those that are open."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._open: dict[int, Question] = {}
        self._nonces = itertools.count(1)
        self._lost = ""
        """Why no answer will ever come."""

    @contextmanager
    def ask(self, on_lead: OnFirst | None = None) -> Generator[Question]:
        """A question, open for as long as somebody waits. `on_lead` is called with rank 0's answer as soon as it is
        read: what rank 0 reported before has been handled then, what it reports later has not. Once the ranks are lost
        whoever waits for answers hears of it at once."""
        question = Question(next(self._nonces), self._ranks, on_lead)
        if self._lost:
            question.abandon(self._lost)
        self._open[question.nonce] = question
        try:
            yield question
        finally:
            del self._open[question.nonce]

    def note(self, answer: wire.Answer) -> None:
        """A rank has answered; late ones are dropped."""
        question = self._open.get(answer.nonce)
        if question is not None:
            question.note(answer)

    def abandon(self, reason: str) -> None:
        """The ranks are lost, for good."""
        self._lost = reason
        for question in self._open.values():
            question.abandon(reason)


def agreed(answers: Sequence[wire.Answer], kind: type[A]) -> list[A]:
    """The answers, all of one kind, from one iteration. Raises MoveRefused if all ranks refuse, RanksDiffer if they
    don't say the same."""
    if len({getattr(answer, "iteration", None) for answer in answers}) != 1:
        raise RanksDiffer(f"answers from different iterations: {answers}")
    if len({type(answer) for answer in answers}) != 1:
        raise RanksDiffer(f"different answers: {answers}")
    return accepted(answers, kind)


def accepted(answers: Sequence[wire.Answer], kind: type[A]) -> list[A]:
    """The answers, all of one kind. Raises MoveRefused if any rank refuses."""
    for answer in answers:
        if isinstance(answer, wire_moves.Refused):
            raise MoveRefused(answer.message, Refusal(answer.refusal))
    chosen: list[A] = [answer for answer in answers if isinstance(answer, kind)]
    if len(chosen) != len(answers):
        raise RanksDiffer(f"not {kind.__name__}: {answers}")
    return chosen


def same(values: Sequence[object], what: str) -> None:
    """Raises RanksDiffer unless they are equal."""
    if any(value != values[0] for value in values):
        raise RanksDiffer(f"{what} differ: {values}")
