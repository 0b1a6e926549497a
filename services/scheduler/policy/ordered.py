"""Places in the order of a figure, kept while figures change one at a time."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from sys import maxsize

Entry = tuple[float, int]
"""Minus the figure, and the place: the list is ascending, the greatest figure comes first, equal ones by place."""


class Ordered:
    """Of places 0 to n - 1, those that have the figure. A change costs O(log n) comparisons and moves pointers."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._by_place: dict[int, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def figure(self, place: int) -> float:
        """Of a place that has one. Raises KeyError."""
        return -self._by_place[place][0]

    def fill(self, figures: Mapping[int, float]) -> None:
        """All at once, which costs less than one by one."""
        self._by_place = {place: (-figure, place) for place, figure in figures.items()}
        self._entries = sorted(self._by_place.values())

    def put(self, place: int, figure: float | None) -> None:
        """It has this figure now; None: it has none."""
        old = self._by_place.get(place)
        if old is not None:
            if figure is not None and old[0] == -figure:
                return
            del self._entries[bisect_left(self._entries, old)]
            del self._by_place[place]
        if figure is not None:
            entry = (-figure, place)
            self._by_place[place] = entry
            insort(self._entries, entry)

    def best(self, first: int) -> int | None:
        """The place with the greatest figure; of equal ones that which comes next from `first` on, going round."""
        if not self._entries:
            return None
        value = self._entries[0][0]
        index = bisect_left(self._entries, (value, first))
        if index < len(self._entries) and self._entries[index][0] == value:
            return self._entries[index][1]
        return self._entries[0][1]

    def at_least(self, figure: float) -> int:
        """How many have at least that figure: the first so many entries."""
        return bisect_left(self._entries, (-figure, maxsize))

    def first(self, count: int) -> list[Entry]:
        """The first so many entries."""
        return self._entries[:count]

    def equal_from(self, value: float, first: int) -> Iterator[int]:
        """Places whose entry begins with `value`, from `first` on, going round."""
        entries = self._entries
        begin, start = bisect_left(entries, (value, -1)), bisect_left(entries, (value, first))
        index = start
        while index < len(entries) and entries[index][0] == value:
            yield entries[index][1]
            index += 1
        for index in range(begin, start):
            yield entries[index][1]
