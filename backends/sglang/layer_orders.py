"""One command to all ranks about layers, and their answers."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from meshift.backends.layouts import LayoutRefused
from meshift.backends.sglang import wire_layers as wire
from meshift.backends.sglang.instance import RankInstance
from meshift.backends.sglang.questions import Question, RanksDiffer
from meshift.backends.sglang.wire import Answer
from meshift.schemas.layouts import LayoutRefusal

ANSWER_TIMEOUT_S = 60.0
"""A rank answers between two steps, and a prefill step may take long."""

A = TypeVar("A")


class LayerOrders:
    """Raises LayoutRefused for what all ranks refuse, RanksDiffer where they don't say the same."""

    def __init__(self, instance: RankInstance) -> None:
        self._instance = instance

    @contextmanager
    def ask(self) -> Generator[Question]:
        """A question whose answers come with another one's command."""
        with self._instance.questions.ask() as question:
            yield question

    async def order(
        self, make: Callable[[int], wire.LayerCommand], kind: type[A], timeout_s: float = ANSWER_TIMEOUT_S
    ) -> list[A]:
        """Put the command into the stream that `make` gives for a nonce; all answers, in rank order. Also raises
        TimeoutError and ConnectionError."""
        with self.ask() as question:
            self._instance.send(make(question.nonce))
            return _expect(await question.answers(timeout_s), kind)


def _expect(answers: Sequence[Answer], kind: type[A]) -> list[A]:
    chosen: list[A] = [answer for answer in answers if isinstance(answer, kind)]
    if len(chosen) == len(answers):
        return chosen
    refused = [answer for answer in answers if isinstance(answer, wire.LayersRefused)]
    # Memory may be short on one rank alone.
    alone = [answer for answer in refused if answer.refusal == LayoutRefusal.NO_MEMORY.value]
    if not alone and len(refused) != len(answers):
        raise RanksDiffer(f"not {kind.__name__}: {answers}")
    first = (alone or refused)[0]
    raise LayoutRefused(first.message, LayoutRefusal(first.refusal))
