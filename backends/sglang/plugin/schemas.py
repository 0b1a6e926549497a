"""Schemas that are compiled before the request comes that obeys them.

Ranks compile at their own pace, but must take the same request at the same iteration. So a rank puts aside what it has
compiled, and the stream says when all have: from then on a request with it needn't wait.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from meshift.backends.sglang import wire_moves as wire

ASIDE_MAX = 16
"""Schemas that are being compiled or put aside; the oldest go first."""


@dataclass(slots=True)
class _Learning:
    """One schema."""

    nonces: list[int]
    since_s: float
    grammar: "Future[Any]"


class Schemas:
    """Of one rank. `backend` gives SGLang's grammar backend, or None; `answer` tells the worker what is compiled."""

    def __init__(
        self,
        backend: Callable[[], Any],
        answer: Callable[[int], None],
        compile_s_max: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._answer = answer
        self._compile_s_max = compile_s_max
        self._clock = clock
        self._learning: dict[str, _Learning] = {}

    @property
    def has_work(self) -> bool:
        """Whether somebody waits for a compilation that may end."""
        limit_s = self._clock() - self._compile_s_max
        return any(learning.nonces and learning.since_s > limit_s for learning in self._learning.values())

    def learn(self, command: wire.LearnSchema) -> None:
        """Begin to compile; `look` answers."""
        schema, backend = command.json_schema, self._backend()
        if schema not in self._learning:
            value: Any = None
            known = backend is None
            if not known:
                value, known = backend.get_cached_or_future_value(_key(schema), False)
            if known:
                self._answer(command.nonce)
                return
            self._learning[schema] = _Learning([], self._clock(), value)
            if len(self._learning) > ASIDE_MAX:
                del self._learning[next(iter(self._learning))]
        self._learning[schema].nonces.append(command.nonce)

    def keep(self, command: wire.KeepSchema) -> None:
        """Requests needn't wait for it any more."""
        learning = self._learning.pop(command.json_schema, None)
        if learning is None:
            return
        try:
            grammar = learning.grammar.result(timeout=0)
        except Exception as error:
            from sglang.srt.constrained.base_grammar_backend import InvalidGrammarObject

            # As SGLang does, so that what is known doesn't differ between ranks.
            grammar = InvalidGrammarObject(f"Grammar compilation failed: {error}")
        self._backend().set_cache(_key(command.json_schema), grammar)

    def look(self) -> None:
        """Once per iteration: answer for those that are compiled."""
        for learning in self._learning.values():
            if learning.nonces and learning.grammar.done():
                nonces, learning.nonces = learning.nonces, []
                for nonce in nonces:
                    self._answer(nonce)


def _key(schema: str) -> tuple[str, str]:
    return "json", schema
