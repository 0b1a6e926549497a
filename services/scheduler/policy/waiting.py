"""The order of dispatches that wait for room: scheduling priority, then arrival (Llumnix, section 4.4.3)."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, order=True)
class Place(Generic[T]):
    """One that waits. Compared by its place in the queue."""

    rank: int
    """Minus its scheduling priority."""
    arrival_s: float
    sequence: int
    """Among equals, the one that came first."""
    item: T = field(compare=False)


class WaitingLine(Generic[T]):
    """Those that wait, next one first."""

    def __init__(self) -> None:
        self._places: list[Place[T]] = []
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Place[T]]:
        return iter(self._places)

    def add(self, item: T, priority: int, arrival_s: float) -> Place[T]:
        """Queue it. `arrival_s` is when its client first asked, whoever was asked then."""
        self._sequence += 1
        place = Place(-priority, arrival_s, self._sequence, item)
        insort(self._places, place)
        return place

    def last(self) -> Place[T]:
        """Whose turn comes after all others'. Raises IndexError if nobody waits."""
        return self._places[-1]

    def remove(self, place: Place[T]) -> None:
        """It waits no more. Idempotent."""
        index = bisect_left(self._places, place)
        if index < len(self._places) and self._places[index] is place:
            del self._places[index]
