"""What every arena is: one reserved range of addresses, of which units are backed with memory individually."""

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import ArrayLike, NDArray

Units = NDArray[np.int64]


class ArenaExhausted(Exception):
    """The system has no more memory for units; the arena is as it was before the call."""


class Arena(ABC):
    """Units [0, `units`) of `unit_bytes` at `base`, one after the other; each is backed with memory or isn't.

    One thread at a time. The content of a unit that was just committed is zero or whatever the device leaves there."""

    def __init__(self, units: int, unit_bytes: int) -> None:
        if units < 1 or unit_bytes < 1:
            raise ValueError(f"{units} units of {unit_bytes} bytes")
        self.units = units
        self.unit_bytes = unit_bytes
        self._backed = np.zeros(units, np.bool_)

    @property
    @abstractmethod
    def base(self) -> int:
        """The address of unit 0."""

    @property
    def committed(self) -> int:
        """How many units are backed."""
        return int(np.count_nonzero(self._backed))

    def is_committed(self, units: ArrayLike) -> NDArray[np.bool_]:
        """For each of the units. Raises IndexError for one that doesn't exist."""
        backed: NDArray[np.bool_] = self._backed[self._checked(units)]
        return backed

    def addresses(self, units: ArrayLike) -> Units:
        """Where they are, backed or not. Raises IndexError."""
        return self.base + self._checked(units) * self.unit_bytes

    def commit(self, units: ArrayLike) -> None:
        """Back all of these, or none: raises ArenaExhausted when the system refuses, ValueError for a unit that is
        backed or named twice, IndexError for one that doesn't exist."""
        wanted = self._checked(units)
        if len(np.unique(wanted)) != len(wanted) or self._backed[wanted].any():
            raise ValueError("units are backed already, or named twice")
        self._commit(wanted)
        self._backed[wanted] = True

    def release(self, units: ArrayLike) -> None:
        """Give the memory of these back to the system; their content is lost. Raises ValueError for a unit that isn't
        backed or is named twice, IndexError for one that doesn't exist."""
        given = self._checked(units)
        if len(np.unique(given)) != len(given) or not self._backed[given].all():
            raise ValueError("units aren't backed, or are named twice")
        self._backed[given] = False
        self._release(given)

    @abstractmethod
    def close(self) -> None:
        """Give everything back, the addresses too. Idempotent; nothing may use the memory any more."""

    @abstractmethod
    def _commit(self, units: Units) -> None: ...

    @abstractmethod
    def _release(self, units: Units) -> None: ...

    def _checked(self, units: ArrayLike) -> Units:
        checked = np.asarray(units, np.int64).reshape(-1)
        if checked.size and (checked.min() < 0 or checked.max() >= self.units):
            raise IndexError(f"units must be within [0, {self.units})")
        return checked


def runs(units: Units) -> list[tuple[int, int]]:
    """Units in any order, each once, as (first, count) of those that follow one another."""
    ordered = np.sort(units)
    if not len(ordered):
        return []
    starts = np.concatenate(([0], np.flatnonzero(np.diff(ordered) != 1) + 1))
    counts = np.diff(np.concatenate((starts, [len(ordered)])))
    return list(zip(ordered[starts].tolist(), counts.tolist(), strict=True))
