"""Page accounting: free, reserved, and used (the rest)."""


class PagePool:
    """Counts pages; which pages is of no matter to a timing model. Callers ask `free` first: going below zero is a
    bug and raises AssertionError."""

    __slots__ = ("capacity", "free", "reserved")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.free = capacity
        self.reserved = 0

    @property
    def used(self) -> int:
        """Held by requests."""
        return self.capacity - self.free - self.reserved

    def take(self, count: int) -> None:
        """Free to used."""
        self.free -= count
        assert self.free >= 0, f"{-self.free} pages too many taken"

    def give(self, count: int) -> None:
        """Used to free."""
        self.free += count
        assert self.used >= 0, f"{-self.used} pages too many given back"

    def resize(self, capacity: int) -> None:
        """Another capacity; what is used and reserved stays."""
        self.free += capacity - self.capacity
        self.capacity = capacity
        assert self.free >= 0, f"{-self.free} pages too many given up"

    def reserve(self, count: int) -> None:
        """Free to reserved."""
        self.take(count)
        self.reserved += count

    def unreserve(self, count: int) -> None:
        """Reserved to free."""
        self.spend(count)
        self.give(count)

    def spend(self, count: int) -> None:
        """Reserved to used."""
        self.reserved -= count
        assert self.reserved >= 0, f"{-self.reserved} pages too many unreserved"
