"""The newest decisions of a scheduler, to be explained to who asks. Remembering one is an append: words and figures are
made when they are asked for, from the observations that the decision was made from."""

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from pydantic import JsonValue

from meshift.schemas.steering import Decision, DecisionAlternative, DecisionSubject
from meshift.services.scheduler.policy.observation import Alternative, Explanation

DECISIONS_MAX = 1_024
OBSERVATIONS_MAX = 65_536
"""Of instances, over all remembered decisions: what bounds the memory in a mesh of many."""

ALTERNATIVES_TOLD_MAX = 32
"""Of one decision."""


class Explainable(Protocol):
    """A decision of a policy."""

    def explain(self) -> Explanation:
        """In words and figures."""


@dataclass(frozen=True, slots=True)
class Remembered:
    """One decision."""

    sequence: int
    at_s: float
    subject: DecisionSubject
    source: Explainable
    observations: int
    model: str
    request_id: str
    attempt: int


class DecisionLog:
    """A ring of them."""

    def __init__(self, decisions_max: int = DECISIONS_MAX, observations_max: int = OBSERVATIONS_MAX) -> None:
        self._decisions_max = decisions_max
        self._observations_max = observations_max
        self._ring: deque[Remembered] = deque()
        self._observations = 0
        self._looks: dict[tuple[DecisionSubject, str], Remembered] = {}
        self.decided = 0

    def __len__(self) -> int:
        return len(self._ring)

    def add(
        self,
        subject: DecisionSubject,
        source: Explainable,
        observations: int,
        at_s: float,
        model: str,
        request_id: str = "",
        attempt: int = 0,
    ) -> None:
        """Remember a decision, made from so many observations of instances."""
        self.decided += 1
        self._ring.append(Remembered(self.decided, at_s, subject, source, observations, model, request_id, attempt))
        self._observations += observations
        while len(self._ring) > self._decisions_max or (
            self._observations > self._observations_max and len(self._ring) > 1
        ):
            self._observations -= self._ring.popleft().observations

    def look(self, subject: DecisionSubject, source: Explainable, at_s: float, model: str) -> None:
        """The newest look at something, whatever came of it: it takes the place of the one before."""
        self._looks[subject, model] = Remembered(self.decided, at_s, subject, source, 0, model, "", 0)

    def newest(
        self, now_s: float, limit: int, subject: DecisionSubject | None = None, request_id: str | None = None
    ) -> tuple[Decision, ...]:
        """The newest first."""
        found: list[Decision] = []
        for item in self._matching(subject, request_id):
            if len(found) == limit:
                break
            found.append(told(item, now_s))
        return tuple(found)

    def current(self, now_s: float, subject: DecisionSubject | None = None) -> tuple[Decision, ...]:
        """The newest looks, of that subject if one is named."""
        return tuple(told(self._looks[key], now_s) for key in sorted(self._looks) if subject in (None, key[0]))

    def _matching(self, subject: DecisionSubject | None, request_id: str | None) -> Iterator[Remembered]:
        for item in reversed(self._ring):
            if subject in (None, item.subject) and request_id in (None, item.request_id):
                yield item


def told(item: Remembered, now_s: float) -> Decision:
    """A decision for the wire."""
    explanation = item.source.explain()
    # Those that were chosen first, which are those that nothing is said against.
    alternatives = sorted(explanation.alternatives, key=lambda alternative: bool(alternative.rejected))
    return Decision(
        sequence=item.sequence,
        age_s=max(0.0, now_s - item.at_s),
        subject=item.subject,
        model=item.model,
        request_id=item.request_id,
        attempt=item.attempt,
        decision=explanation.decision,
        why=explanation.why,
        inputs=_inputs(explanation.inputs),
        alternatives=tuple(map(_alternative, alternatives[:ALTERNATIVES_TOLD_MAX])),
        alternatives_left_out=max(0, len(alternatives) - ALTERNATIVES_TOLD_MAX),
    )


def _alternative(alternative: Alternative) -> DecisionAlternative:
    figures = {name: _finite(value) for name, value in alternative.figures.items()}
    return DecisionAlternative(name=alternative.name, figures=figures, rejected=alternative.rejected)


def _inputs(inputs: Mapping[str, object]) -> dict[str, JsonValue]:
    return {name: _plain(value) for name, value in inputs.items()}


def _plain(value: object) -> JsonValue:
    if isinstance(value, float):
        return _finite(value)
    return value if isinstance(value, int | str) or value is None else str(value)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
