"""A set that forgets."""

from typing import Generic, TypeVar

T = TypeVar("T")


class BoundedSet(Generic[T]):
    """Keeps the newest `size_max` things."""

    def __init__(self, size_max: int) -> None:
        self._size_max = size_max
        self._things: dict[T, None] = {}

    def __contains__(self, thing: object) -> bool:
        return thing in self._things

    def __len__(self) -> int:
        return len(self._things)

    def add(self, thing: T) -> None:
        """Remember it, as the newest."""
        self._things.pop(thing, None)
        self._things[thing] = None
        if len(self._things) > self._size_max:
            del self._things[next(iter(self._things))]

    def discard(self, thing: T) -> None:
        """Forget it."""
        self._things.pop(thing, None)
