"""Which slots were written since a reader last looked: what a live copy must copy again (PipeLive, section
5).

One bit per slot and reader; a reader is one (source, destination) pair of a move, and each has to see every
write. Two rules make it safe without a lock, while one thread computes and another copies:

    the writer    writes the slots, then marks them
    the drainer   clears the bits (`swap`), then reads the slots

A write that comes after the read is marked after the clear, so the next drain finds it. A write that comes
before the read may be copied twice, which is harmless: a patch holds the newest values. A mark that falls
between the drainer's look and its clear is lost on purpose: its slot is among those about to be read, and
was written before.

Each bit is a byte of its own, so that marks and clears of different slots don't touch one another.
"""

from collections.abc import Hashable

import numpy as np
from numpy.typing import ArrayLike, NDArray

Slots = NDArray[np.int64]
"""Slot numbers, ascending, each once."""


class DirtyMap:
    """Bits for slots [0, `slots`).

    `mark`, `add_reader` and `remove_reader` belong to the writer's thread (between two steps). `swap` of
    one reader belongs to one thread, which may be another; different readers may have different ones."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._bits: dict[Hashable, NDArray[np.bool_]] = {}

    @property
    def readers(self) -> tuple[Hashable, ...]:
        """In the order in which they came."""
        return tuple(self._bits)

    def add_reader(self, reader: Hashable, dirty: ArrayLike = ()) -> None:
        """From now on `reader` sees every write; `dirty` are the slots of its first round (those that hold
        anything).

        Raises ValueError if it is there already, IndexError for a slot that doesn't exist."""
        if reader in self._bits:
            raise ValueError(f"reader {reader!r} is there already")
        bits = np.zeros(self.slots, np.bool_)
        bits[self._checked(dirty)] = True
        # A new dict, since `swap` may look a reader up in another thread.
        self._bits = {**self._bits, reader: bits}

    def remove_reader(self, reader: Hashable) -> None:
        """Forget it. Idempotent."""
        self._bits = {name: bits for name, bits in self._bits.items() if name != reader}

    def mark(self, slots: ArrayLike) -> None:
        """These slots were written. Any order, repetitions allowed. Raises IndexError for one that doesn't
        exist."""
        if not self._bits:
            return
        checked = self._checked(slots)
        for bits in self._bits.values():
            bits[checked] = True

    def mark_for(self, reader: Hashable, slots: ArrayLike) -> None:
        """This reader must copy these again: what it drained did not arrive. Called by its own thread."""
        self._bits[reader][self._checked(slots)] = True

    def swap(self, reader: Hashable) -> Slots:
        """The dirty slots of this reader, which are clean from now on. Raises KeyError if it isn't there."""
        bits = self._bits[reader]
        # A copy, because numpy refuses to list the ones of an array that changes meanwhile.
        dirty = np.flatnonzero(bits.copy())
        bits[dirty] = False
        return dirty.astype(np.int64, copy=False)

    def count(self, reader: Hashable) -> int:
        """How many slots are dirty for this reader. Raises KeyError if it isn't there."""
        return int(np.count_nonzero(self._bits[reader]))

    def _checked(self, slots: ArrayLike) -> Slots:
        checked = np.asarray(slots, np.int64)
        if checked.size and (checked.min() < 0 or checked.max() >= self.slots):
            raise IndexError(f"slots must be within [0, {self.slots})")
        return checked


def slot_ranges(slots: Slots, gap_max: int = 0) -> list[tuple[int, int]]:
    """Ascending slots as ranges [start, end); clean gaps of up to `gap_max` slots are bridged.

    Bridging sends a few clean slots again to send fewer patches; a patch holds the newest values, so it is
    harmless where both ends use the same slots."""
    if not len(slots):
        return []
    breaks = np.flatnonzero(np.diff(slots) > gap_max + 1)
    starts = slots[np.concatenate(([0], breaks + 1))]
    ends = slots[np.concatenate((breaks, [len(slots) - 1]))] + 1
    return list(zip(starts.tolist(), ends.tolist(), strict=True))
