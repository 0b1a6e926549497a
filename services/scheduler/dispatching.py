"""Keeps an index of each model's instances for dispatching, brought up to date when a dispatch asks."""

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
        self._by_model: dict[str, DispatchIndex] = {}
        self._changed: dict[Owner, None] = {}

    def changed(self, owner: Owner) -> None:
        """Its report, or what is charged to it, is another."""
        self._changed[owner] = None

    def reset(self) -> None:
        """Other instances take requests than before."""
        self._by_model.clear()
        self._changed.clear()

    def choose(
        self, model: str, demand: int, turn: int, settings: PolicySettings, *, may_wait: bool
    ) -> DispatchDecision | None:
        """As `choose_instance` of the model's candidates."""
        self._catch_up()
        index = self._by_model.get(model)
        if index is None or index.settings is not settings:
            candidates = self._candidates(model)
            if not candidates:
                # Whoever asks for what nobody serves is not remembered: names are the clients'.
                return None
            index = self._by_model[model] = DispatchIndex(candidates, settings)
        return index.choose(demand, turn, may_wait=may_wait)

    def _catch_up(self) -> None:
        if not self._changed:
            return
        observed = [item for item in map(self._observe, self._changed) if item is not None]
        self._changed.clear()
        for index in self._by_model.values():
            index.update(item for item in observed if item.owner in index)
