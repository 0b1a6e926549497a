"""What can go wrong on the memory bus, from a seeded generator: loss, repetition, delay, partitions."""

import random
from collections.abc import Callable, Iterable

from meshift.services.bus.delay_line import NANOSECONDS

Link = Callable[[str, str, str], bool]
"""`(sender, receiver, subject) -> bool`: whether a message is subject to the random faults. The subject of an answer
is that of its request."""


class Partition:
    """A cut between two sets of clients; made by `Faults.partition`."""

    def __init__(self, side: Iterable[str], other_side: Iterable[str], *, one_way: bool) -> None:
        self._side = frozenset(side)
        self._other_side = frozenset(other_side)
        self._one_way = one_way

    def cuts(self, sender: str, receiver: str) -> bool:
        """Whether messages from `sender` to `receiver` are lost."""
        if sender in self._side and receiver in self._other_side:
            return True
        return not self._one_way and sender in self._other_side and receiver in self._side


class Faults:
    """Faults of a `MemoryNetwork`; may be changed at any time, and act on what is sent from then on.

    `drop`, `duplicate` and `delay` are probabilities a message (and receiver; requests and answers count as messages);
    a delayed one comes up to `delay_s_max` later, so that others overtake it.
    """

    def __init__(
        self,
        rng: random.Random,
        *,
        drop: float = 0.0,
        duplicate: float = 0.0,
        delay: float = 0.0,
        delay_s_max: float = 0.0,
        link: Link | None = None,
    ) -> None:
        self._rng = rng
        self._partitions: list[Partition] = []
        self.set(drop=drop, duplicate=duplicate, delay=delay, delay_s_max=delay_s_max, link=link)

    def set(
        self,
        *,
        drop: float = 0.0,
        duplicate: float = 0.0,
        delay: float = 0.0,
        delay_s_max: float = 0.0,
        link: Link | None = None,
    ) -> None:
        """Replace all random faults; what isn't named is off. Partitions stay."""
        for name, probability in (("drop", drop), ("duplicate", duplicate), ("delay", delay)):
            if not 0.0 <= probability <= 1.0:
                raise ValueError(f"{name} is a probability, not {probability}")
        if delay_s_max < 0.0 or (delay > 0.0 and delay_s_max == 0.0):
            raise ValueError(f"delay_s_max must be positive, not {delay_s_max}")
        self._drop, self._duplicate, self._delay = drop, duplicate, delay
        self._delay_ns_max = round(delay_s_max * NANOSECONDS)
        self._link = link
        self._update()

    def partition(self, side: Iterable[str], other_side: Iterable[str], *, one_way: bool = False) -> Partition:
        """Lose all messages between two sets of client names; with `one_way`, only those from `side` to
        `other_side`."""
        partition = Partition(side, other_side, one_way=one_way)
        self._partitions.append(partition)
        self._update()
        return partition

    def heal(self, partition: Partition | None = None) -> None:
        """End one partition, or all. Idempotent."""
        self._partitions = [p for p in self._partitions if partition is not None and p is not partition]
        self._update()

    def _update(self) -> None:
        self._random = bool(self._drop or self._duplicate or self._delay)
        self.active = self._random or bool(self._partitions)

    def copies(self, sender: str, receiver: str, subject: str) -> tuple[int, ...]:
        """What becomes of a message: the extra delay, in ns, of each copy that arrives; empty if it is lost."""
        if any(partition.cuts(sender, receiver) for partition in self._partitions):
            return ()
        if not self._random or (self._link is not None and not self._link(sender, receiver, subject)):
            return (0,)
        if self._hits(self._drop):
            return ()
        if self._hits(self._duplicate):
            return (self._extra_ns(), self._extra_ns())
        return (self._extra_ns(),)

    def _extra_ns(self) -> int:
        return self._rng.randint(1, self._delay_ns_max) if self._hits(self._delay) else 0

    def _hits(self, probability: float) -> bool:
        return probability > 0.0 and self._rng.random() < probability
