"""Observations as they were at a decision, without a copy for each: a common beginning, and what changed since."""

from collections.abc import Iterator, Sequence
from typing import overload

from meshift.services.scheduler.policy.observation import InstanceObservation

Change = tuple[int, InstanceObservation]


class Snapshot(Sequence[InstanceObservation]):
    """Put together when somebody asks, which few decisions see."""

    __slots__ = ("_base", "_changes", "_count", "_made", "kept")

    def __init__(self, base: Sequence[InstanceObservation], changes: Sequence[Change], count: int, kept: int) -> None:
        """`base` never changes, `changes` only grows: the first `count` of them belong here. `kept`: how many
        observations are in memory for this one, which the one before didn't need."""
        self._base = base
        self._changes = changes
        self._count = count
        self.kept = kept
        self._made: tuple[InstanceObservation, ...] | None = None

    def __len__(self) -> int:
        return len(self._base)

    def __iter__(self) -> Iterator[InstanceObservation]:
        return iter(self._all())

    @overload
    def __getitem__(self, index: int) -> InstanceObservation: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[InstanceObservation]: ...
    def __getitem__(self, index: int | slice) -> InstanceObservation | Sequence[InstanceObservation]:
        return self._all()[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._all() == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def _all(self) -> tuple[InstanceObservation, ...]:
        if self._made is None:
            made = list(self._base)
            for place, observation in self._changes[: self._count]:
                made[place] = observation
            self._made = tuple(made)
        return self._made


class Recording:
    """The newest observations, by place, from which snapshots are taken."""

    def __init__(self, observations: Sequence[InstanceObservation]) -> None:
        self.now = list(observations)
        self._base = tuple(observations)
        self._changes: list[Change] = []
        self._told = -len(self._base)

    def put(self, place: int, observation: InstanceObservation) -> None:
        """It changed."""
        self.now[place] = observation
        self._changes.append((place, observation))

    def snapshot(self) -> Snapshot:
        """As of now."""
        if len(self._changes) > len(self._base):
            # A new beginning, so that neither memory nor the work to put one together grows on.
            self._base, self._changes, self._told = tuple(self.now), [], -len(self._base)
        count = len(self._changes)
        kept, self._told = count - self._told, count
        return Snapshot(self._base, self._changes, count, kept)


def kept_observations(instances: Sequence[InstanceObservation]) -> int:
    """How many are in memory for the sake of this sequence."""
    return instances.kept if isinstance(instances, Snapshot) else len(instances)
