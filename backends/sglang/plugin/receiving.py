"""Slots that are kept for one request on its way here, and what arrives in them."""

from collections.abc import Callable
from typing import Any

import torch

from meshift.backends.sglang import wire_moves as wire
from meshift.backends.sglang.plugin.copying import RowReader, part_rectangle
from meshift.backends.sglang.plugin.kv import RankKv
from meshift.kv_memory.transport.base import Patch

OnApplied = Callable[[int, int], None]
"""Gets a pair and up to which token all of its KV is there. On the data thread."""


class Reservation:
    """Room for one request on one rank: a locked cached prefix of `cached` tokens, and whole pages of its own after
    it. The same slots on every rank."""

    def __init__(self, cached: int, node: Any, lock: Any, device: Any) -> None:
        self.cached = cached
        self.node = node
        """Of the prefix tree, where the cached prefix ends."""
        self.lock = lock
        self.slots = torch.empty(0, dtype=torch.int64, device=device)
        """`slots[i]` is for token `cached + i`."""
        self.receivers: list[Receiver] = []

    @property
    def end(self) -> int:
        """Tokens that there is room for."""
        return self.cached + len(self.slots)

    def reader(self, kv: RankKv) -> RowReader:
        """Of what has arrived."""
        return RowReader(kv, self.slots, self.cached)


class Receiver:
    """Takes the patches of one pair, on the data thread."""

    def __init__(self, part: wire.PairPart, reservation: Reservation, kv: RankKv, on_applied: OnApplied) -> None:
        self.part = part
        self._reservation = reservation
        self._kv = kv
        self._on_applied = on_applied
        self._applied = reservation.cached
        self._generation = -1
        self._watermark = 0

    def apply(self, patch: Patch) -> None:
        """A `PatchHandler`. Raises ValueError for what isn't to be written."""
        area, reservation = patch.rectangle, self._reservation
        first, slots = reservation.cached, reservation.slots
        if area != part_rectangle(self.part, area.token_start, area.token_end):
            raise ValueError(f"{area} has not the layers and heads of pair {self.part.pair}")
        if area.token_start < first or area.token_end > first + len(slots):
            raise ValueError(f"{area} in a reservation for tokens [{first}, {first + len(slots)})")
        self._accept(patch)
        if not area.empty:
            self._kv.scatter(area, slots[area.token_start - first : area.token_end - first], patch.payload)
        if area.token_start <= self._applied:
            self._applied = max(self._applied, area.token_end)
        self._on_applied(self.part.pair, self._applied)

    def _accept(self, patch: Patch) -> None:
        """With a newer generation of the source's pages, what came before counts for nothing."""
        newer = patch.generation > self._generation
        if not newer and (patch.generation < self._generation or patch.watermark < self._watermark):
            raise ValueError(f"generation {patch.generation}, watermark {patch.watermark} is older than seen")
        if newer:
            self._applied = self._reservation.cached
        self._generation, self._watermark = patch.generation, patch.watermark
