"""Slots that are kept for requests on their way here, and what arrives in them."""

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.radix_cache import RadixKey

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


class Reservations:
    """All of one rank, by the id that SGLang will have for the request."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._by_rid: dict[str, Reservation] = {}

    def __len__(self) -> int:
        return len(self._by_rid)

    def get(self, rid: str) -> Reservation | None:
        """The reservation, if there is one."""
        return self._by_rid.get(rid)

    def items(self) -> list[tuple[str, Reservation]]:
        """In an order that is the same on all ranks."""
        return sorted(self._by_rid.items())

    @property
    def tokens(self) -> int:
        """In pages that are kept for reservations alone."""
        return sum(len(reservation.slots) for reservation in self._by_rid.values())

    def reserve(self, rid: str, tokens: Sequence[int], slots: int) -> Reservation | None:
        """A new one, or a known one made larger; None, and nothing changed, if there is no room."""
        known = self._by_rid.get(rid)
        reservation = known or self._open(tokens)
        if not self._grow(reservation, slots):
            if known is None:
                self._scheduler.tree_cache.unlock(reservation.lock)
            return None
        self._by_rid[rid] = reservation
        return reservation

    def take(self, rid: str) -> Reservation:
        """End a reservation, whose slots and lock are the caller's now."""
        return self._by_rid.pop(rid)

    def free(self, rid: str) -> None:
        """End a reservation; nobody may write into it any more. Idempotent."""
        reservation = self._by_rid.pop(rid, None)
        if reservation is not None:
            self._scheduler.token_to_kv_pool_allocator.free(reservation.slots)
            self._scheduler.tree_cache.unlock(reservation.lock)

    def _open(self, tokens: Sequence[int]) -> Reservation:
        tree, device = self._scheduler.tree_cache, self._scheduler.token_to_kv_pool_allocator.device
        aligned = len(tokens) // self._scheduler.page_size * self._scheduler.page_size
        if tree.disable or not aligned:
            return Reservation(0, None, None, device)
        key = RadixKey(array("q", tokens[:aligned]), extra_key=None, cache_salt=None)
        match = tree.match_prefix(MatchPrefixParams(key=key))
        node = match.last_device_node
        return Reservation(match.device_prefix_len, node, tree.lock(node), device)

    def _grow(self, reservation: Reservation, slots: int) -> bool:
        page_size = self._scheduler.page_size
        missing = -(-slots // page_size) * page_size - reservation.end
        if missing <= 0:
            return True
        allocator = self._scheduler.token_to_kv_pool_allocator
        evict_from_tree_cache(self._scheduler.tree_cache, missing)
        more = allocator.alloc(missing)
        if more is None:
            return False
        reservation.slots = torch.cat((reservation.slots, more.to(torch.int64)))
        return True
