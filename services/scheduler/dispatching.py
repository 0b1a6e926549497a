"""Keeps an index of each model's instances for dispatching, brought up to date when a dispatch asks: one for requests
of no priority, and one for each class of those that have some, as they see other headroom."""

from collections.abc import Callable, Sequence

from meshift.schemas.identity import Owner
from meshift.services.scheduler.policy.dispatch import DispatchDecision
from meshift.services.scheduler.policy.index import DispatchIndex
from meshift.services.scheduler.policy.observation import InstanceObservation
from meshift.services.scheduler.policy.settings import PolicySettings

Candidates = Callable[[str], Sequence[InstanceObservation]]
"""Of a model: those that take requests, in the order of their ids."""

Observe = Callable[[Owner], InstanceObservation | None]


class DispatchIndexes:
    """Of one scheduler. Whoever changes what a decision sees of an instance says so."""

    def __init__(self, candidates: Candidates, observe: Observe) -> None:
        self._candidates = candidates
        self._observe = observe
        self._by_model: dict[tuple[str, int], DispatchIndex] = {}
        self._executions: set[int] = set()
        """Classes that reports told of."""
        self._changed: dict[Owner, None] = {}

    def changed(self, owner: Owner) -> None:
        """Its report, or what is charged to it, is another."""
        self._changed[owner] = None

    def reset(self) -> None:
        """Other instances take requests than before."""
        self._by_model.clear()
        self._changed.clear()

    def choose(
        self,
        model: str,
        demand: int,
        turn: int,
        settings: PolicySettings,
        *,
        may_wait: bool,
        execution: int = 0,
        waited_s: float = 0.0,
    ) -> DispatchDecision | None:
        """As `choose_instance` of the model's candidates, seen by a request of that execution priority."""
        self._catch_up()
        level = self._level(execution) if settings.sees_classes else 0
        index = self._by_model.get((model, level))
        if index is None or index.settings is not settings:
            candidates = self._candidates(model)
            if not candidates:
                # Whoever asks for what nobody serves is not remembered: names are the clients'.
                return None
            self._note_classes(candidates)
            level = self._level(execution) if settings.sees_classes else 0
            index = self._by_model[model, level] = DispatchIndex(seen_by(level, candidates), settings)
        return index.choose(demand, turn, may_wait=may_wait, waited_s=waited_s)

    def _level(self, execution: int) -> int:
        """A priority that sees the same headroom: of these there are no more than classes, however many clients ask
        for."""
        if execution <= 0:
            return 0
        return max((item for item in self._executions if 0 < item <= execution), default=1)

    def _note_classes(self, observed: Sequence[InstanceObservation]) -> None:
        self._executions.update(load.execution for item in observed for load in item.report.classes)

    def _catch_up(self) -> None:
        if not self._changed:
            return
        observed = [item for item in map(self._observe, self._changed) if item is not None]
        self._changed.clear()
        self._note_classes(observed)
        for (_, level), index in self._by_model.items():
            index.update(seen_by(level, [item for item in observed if item.owner in index]))


def seen_by(execution: int, instances: Sequence[InstanceObservation]) -> list[InstanceObservation]:
    """As a request of that execution priority sees them."""
    return [item._replace(execution=execution) for item in instances] if execution > 0 else list(instances)
