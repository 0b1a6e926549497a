"""Which pages of an instance's KV memory are free, used, cached, reserved or given up, and where each block is.

Every page is in one state; the capacity is all that aren't given up:

    free + used + cached + reserved = capacity

All groups of a page come and go together, so one table serves all of a rank's layers. It knows pages; policies speak of
tokens. Reservations have an owner and a deadline, so that nobody's crash leaks one."""

from collections.abc import Hashable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray

Pages = NDArray[np.int64]


class PageState(IntEnum):
    """Of one page."""

    GIVEN_UP = 0
    FREE = 1
    USED = 2
    CACHED = 3
    RESERVED = 4


class OutOfPages(Exception):
    """Fewer pages are free than were asked for; nothing has changed."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Pages by state, without those that are given up."""

    free: int
    used: int
    cached: int
    reserved: int

    @property
    def capacity(self) -> int:
        """All of them."""
        return self.free + self.used + self.cached + self.reserved


@dataclass(frozen=True, slots=True)
class _Reservation:
    pages: Pages
    deadline_s: float


class BlockTable:
    """Pages [0, `pages_max`), of which the first `pages` are there at the start. One thread at a time."""

    def __init__(self, pages_max: int, pages: int) -> None:
        if not 0 <= pages <= pages_max:
            raise ValueError(f"{pages} of {pages_max} pages")
        self.pages_max = pages_max
        self._states = np.full(pages_max, PageState.GIVEN_UP, np.int8)
        self._states[:pages] = PageState.FREE
        self._tally = np.zeros(len(PageState), np.int64)
        self._tally[PageState.FREE] = pages
        self._tally[PageState.GIVEN_UP] = pages_max - pages
        # A stack that may hold pages which are free no more; the states decide.
        self._free = np.arange(pages - 1, -1, -1, dtype=np.int64)
        self._reservations: dict[Hashable, _Reservation] = {}

    @property
    def counts(self) -> Counts:
        """Now."""
        tally = self._tally.tolist()
        return Counts(
            free=tally[PageState.FREE],
            used=tally[PageState.USED],
            cached=tally[PageState.CACHED],
            reserved=tally[PageState.RESERVED],
        )

    def in_state(self, state: PageState) -> Pages:
        """The pages in one state, ascending."""
        return np.flatnonzero(self._states == state)

    # ---- requests

    def allocate(self, count: int) -> Pages:
        """Free pages become used. Raises OutOfPages, ValueError."""
        return self._take(count, PageState.USED)

    def free(self, pages: ArrayLike) -> None:
        """Used pages become free. Raises ValueError, as all that follow, if one is in another state."""
        self._put_back(self._move(pages, PageState.USED, PageState.FREE))

    def cache(self, pages: ArrayLike) -> None:
        """Used pages become cached: nobody holds them, but their content may be wanted again."""
        self._move(pages, PageState.USED, PageState.CACHED)

    def reuse(self, pages: ArrayLike) -> None:
        """Cached pages become used."""
        self._move(pages, PageState.CACHED, PageState.USED)

    def evict(self, pages: ArrayLike) -> None:
        """Cached pages become free."""
        self._put_back(self._move(pages, PageState.CACHED, PageState.FREE))

    # ---- moves

    def reserve(self, owner: Hashable, count: int, deadline_s: float) -> Pages:
        """Promise free pages to `owner` until a time on the caller's clock. Raises OutOfPages; ValueError if the owner
        has a reservation."""
        if owner in self._reservations:
            raise ValueError(f"{owner!r} has a reservation")
        pages = self._take(count, PageState.RESERVED)
        self._reservations[owner] = _Reservation(pages, deadline_s)
        return pages

    def claim(self, owner: Hashable) -> Pages:
        """What was promised becomes used. Raises KeyError if there is no such reservation (any more)."""
        pages = self._reservations.pop(owner).pages
        return self._move(pages, PageState.RESERVED, PageState.USED)

    def cancel(self, owner: Hashable) -> Pages:
        """What was promised becomes free; which pages. Raises KeyError."""
        pages = self._reservations.pop(owner).pages
        self._put_back(self._move(pages, PageState.RESERVED, PageState.FREE))
        return pages

    def expire(self, now_s: float) -> list[Hashable]:
        """Cancel what is past its deadline; whose it was."""
        late = [owner for owner, held in self._reservations.items() if held.deadline_s <= now_s]
        for owner in late:
            self.cancel(owner)
        return late

    # ---- capacity

    def compact(self, count: int) -> Pages:
        """Which `count` pages to give up: free ones, those of the highest numbers. Nothing changes, and no data
        moves: a block is a unit of its own, so any free page can go. Raises OutOfPages."""
        return pick_pages(self.in_state(PageState.FREE), count)

    def shrink(self, count: int) -> Pages:
        """Give up `count` free pages; which. Raises OutOfPages."""
        return self._move(self.compact(count), PageState.FREE, PageState.GIVEN_UP)

    def grow(self, count: int) -> Pages:
        """Take back `count` pages, those of the lowest numbers; which. Raises ValueError beyond `pages_max`."""
        given_up = self.in_state(PageState.GIVEN_UP)
        if not 0 <= count <= len(given_up):
            raise ValueError(f"{count} pages of {len(given_up)} that can come back")
        pages = self._move(given_up[:count], PageState.GIVEN_UP, PageState.FREE)
        self._put_back(pages[::-1])
        return pages

    def check_integrity(self) -> None:
        """Raise AssertionError if the table contradicts itself. Looks at every page."""
        tally = np.bincount(self._states, minlength=len(PageState))
        assert tally.tolist() == self._tally.tolist(), f"counted {self._tally.tolist()}, there are {tally.tolist()}"
        free = self._free[self._states[self._free] == PageState.FREE]
        assert len(np.unique(free)) == tally[PageState.FREE], "a free page can't be found"
        promised = [page for held in self._reservations.values() for page in held.pages.tolist()]
        assert sorted(promised) == self.in_state(PageState.RESERVED).tolist(), "reservations and states differ"

    # ---- within

    def _take(self, count: int, state: PageState) -> Pages:
        if count < 0:
            raise ValueError(f"{count} pages")
        if count > self._tally[PageState.FREE]:
            raise OutOfPages(f"{count} pages of {self._tally[PageState.FREE]} free ones")
        top = self._free[len(self._free) - count :]
        if (self._states[top] != PageState.FREE).any() or len(np.unique(top)) != count:
            self._free = self.in_state(PageState.FREE)[::-1]
            top = self._free[len(self._free) - count :]
        self._free = self._free[: len(self._free) - count]
        return self._move(top[::-1], PageState.FREE, state)

    def _put_back(self, pages: Pages) -> None:
        self._free = np.concatenate((self._free, pages))
        if len(self._free) > 2 * self.pages_max:
            self._free = self.in_state(PageState.FREE)[::-1]

    def _move(self, pages: ArrayLike, before: PageState, after: PageState) -> Pages:
        moved = np.array(pages, np.int64).reshape(-1)
        if moved.size and (moved.min() < 0 or moved.max() >= self.pages_max):
            raise ValueError(f"pages must be within [0, {self.pages_max})")
        if (self._states[moved] != before).any() or len(np.unique(moved)) != len(moved):
            raise ValueError(f"pages aren't all {before.name.lower()}, or named twice")
        self._states[moved] = after
        self._tally[before] -= len(moved)
        self._tally[after] += len(moved)
        return moved


def pick_pages(free: ArrayLike, count: int) -> Pages:
    """The `count` highest of the free pages, ascending: the rest then lies close together, and gives back long runs
    when its turn comes. Raises OutOfPages."""
    candidates = np.asarray(free, np.int64)
    if not 0 <= count <= len(candidates):
        raise OutOfPages(f"{count} pages of {len(candidates)} free ones")
    if not count:
        return candidates[:0]
    if (np.diff(candidates) < 0).any():
        candidates = np.sort(candidates)
    return candidates[len(candidates) - count :]
