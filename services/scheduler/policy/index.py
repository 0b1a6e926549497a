"""Dispatch without looking at every instance: decides as `choose_instance`, from orders of the instances' figures that
are kept while reports and dispatches change one instance at a time."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from meshift.schemas.identity import Owner
from meshift.services.scheduler.policy.dispatch import (
    DispatchDecision,
    decide_for,
    preference,
    rank_instance,
    reach,
    takes_waiting,
)
from meshift.services.scheduler.policy.freeness import dispatch_freeness, memory_load
from meshift.services.scheduler.policy.observation import InstanceObservation
from meshift.services.scheduler.policy.ordered import Ordered
from meshift.services.scheduler.policy.settings import PolicyName, PolicySettings
from meshift.services.scheduler.policy.snapshots import Recording

FEW = 32
"""So few fitting instances are looked at one by one; of more, the freest that fits is found soon in the order of
freeness."""

REFILL_SHARE = 4
"""When one in so many has changed, sorting all anew costs less."""

Figures = Mapping[str, float | None]
"""Of one instance, by order; None: it isn't in that order."""


def _fit_figures(instance: InstanceObservation, settings: PolicySettings) -> Figures:
    """meshift: where it fits, the freest; else where it may wait and has the most room; else the most room."""
    room = float(instance.offered)
    waits = takes_waiting(instance, settings.dispatch)
    return {
        "preference": preference(instance, settings),
        "reach": reach(instance, settings.dispatch),
        "waits": room if waits else None,
        "full": None if waits else room,
    }


def _freeness_figures(instance: InstanceObservation, settings: PolicySettings) -> Figures:
    return {"best": dispatch_freeness(instance, headroom=settings.sees_priorities)}


def _load_figures(instance: InstanceObservation, settings: PolicySettings) -> Figures:
    return {"best": -float(memory_load(instance))}


def _no_figures(instance: InstanceObservation, settings: PolicySettings) -> Figures:
    return {}


FIGURES: Mapping[PolicyName, Callable[[InstanceObservation, PolicySettings], Figures]] = {
    "meshift": _fit_figures,
    "llumnix": _freeness_figures,
    "llumnix-base": _freeness_figures,
    "infaas++": _load_figures,
    "central": _load_figures,
    "round-robin": _no_figures,
}


class DispatchIndex:
    """Of the instances that could take a request, each at its place in the order that ties follow."""

    def __init__(self, instances: Sequence[InstanceObservation], settings: PolicySettings) -> None:
        self.settings = settings
        self._figures = FIGURES[settings.policy]
        self._places = {instance.owner: place for place, instance in enumerate(instances)}
        self._recording = Recording(instances)
        self._queues = sum(instance.waiting > 0 for instance in instances)
        self._orders: dict[str, Ordered] = {}
        self._fill()

    def __contains__(self, owner: Owner) -> bool:
        return owner in self._places

    def __len__(self) -> int:
        return len(self._places)

    def update(self, changed: Iterable[InstanceObservation]) -> None:
        """These, which it has, changed."""
        changed = list(changed)
        for instance in changed:
            place = self._places[instance.owner]
            self._queues += (instance.waiting > 0) - (self._recording.now[place].waiting > 0)
            self._recording.put(place, instance)
        if len(changed) * REFILL_SHARE > len(self):
            self._fill()
            return
        for instance in changed:
            place = self._places[instance.owner]
            for name, figure in self._figures(instance, self.settings).items():
                self._orders[name].put(place, figure)

    def choose(
        self, demand: int, turn: int, *, may_wait: bool = True, waited_s: float = 0.0
    ) -> DispatchDecision | None:
        """As `choose_instance` of all its instances."""
        count = len(self)
        if not count:
            return None
        place = self._best(demand, turn % count)
        chosen = self._recording.now[place]
        rank = rank_instance(chosen, demand, (place - turn) % count, self.settings)
        instances, queues = self._recording.snapshot(), self._queues
        return decide_for(
            chosen, rank, demand, turn, self.settings, instances, queues, may_wait=may_wait, waited_s=waited_s
        )

    def _fill(self) -> None:
        by_name: dict[str, dict[int, float]] = {}
        for place, instance in enumerate(self._recording.now):
            for name, figure in self._figures(instance, self.settings).items():
                figures = by_name.setdefault(name, {})
                if figure is not None:
                    figures[place] = figure
        for name, figures in by_name.items():
            self._orders.setdefault(name, Ordered()).fill(figures)

    def _best(self, demand: int, first: int) -> int:
        if self.settings.policy == "meshift":
            places = (self._best_fitting(demand, first), self._orders["waits"].best(first))
            return next((place for place in places if place is not None), self._fullest(first))
        best = self._orders["best"].best(first) if "best" in self._orders else None
        return first if best is None else best

    def _fullest(self, first: int) -> int:
        best = self._orders["full"].best(first)
        return first if best is None else best

    def _best_fitting(self, demand: int, first: int) -> int | None:
        count = self._orders["reach"].at_least(demand)
        if not count:
            return None
        if count <= FEW:
            return self._preferred_of([place for _, place in self._orders["reach"].first(count)], first)
        reaches = self._orders["reach"]
        for value, place in self._orders["preference"]:
            if reaches.figure(place) >= demand:
                # Of those that are as free, the one whose turn comes first.
                equal = self._orders["preference"].equal_from(value, first)
                return next(other for other in equal if reaches.figure(other) >= demand)
        return None

    def _preferred_of(self, places: Sequence[int], first: int) -> int:
        preferred, count = self._orders["preference"], len(self)
        return max(places, key=lambda place: (preferred.figure(place), -((place - first) % count)))
