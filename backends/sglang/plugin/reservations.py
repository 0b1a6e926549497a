"""Room for requests on their way here: whole pages of their own, behind a cached prefix that is locked."""

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.radix_cache import RadixKey

from meshift.backends.sglang.plugin.receiving import Reservation


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
