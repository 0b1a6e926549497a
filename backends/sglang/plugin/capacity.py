"""The number of KV slots of a running scheduler, changed at one point of the request stream.

Every rank does this in the same iteration from the same state, and so gives up, or takes back, the same pages. Cached
prefixes go first. Running requests keep their memory unless the command says that they may be preempted."""

import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from meshift.backends.sglang import wire
from meshift.kv_memory.arena import ArenaExhausted
from meshift.kv_memory.block_table import pick_pages

REQUEST_SLACK_TOKENS = 2
"""SGLang keeps the last two positions of the context, and as many slots, out of use."""

_HOLDERS = ("pool_stats_observer", "invariant_checker", "load_inquirer", "kv_events_publisher")
"""Parts of SGLang's scheduler that keep a copy of the capacity."""


class KvCapacity:
    """One per scheduler. `given_up` are pages that SGLang's allocator has never seen or has been relieved of."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._allocator = scheduler.token_to_kv_pool_allocator
        self._page_size: int = self._allocator.page_size
        self._given_up = torch.empty(0, dtype=torch.int64)
        self.growth_obstacle = ""
        """Why it may not grow now; empty if it may."""
        clear = self._allocator.clear

        def clear_but_given_up() -> None:
            """SGLang puts all pages back into its list when it flushes the cache."""
            clear()
            free = self._allocator.free_pages
            self._allocator.free_pages = free[~torch.isin(free, self._given_up)]

        self._allocator.clear = clear_but_given_up

    @property
    def given_up(self) -> NDArray[np.int64]:
        """Pages that hold nothing and may not be written."""
        pages: NDArray[np.int64] = self._given_up.numpy()
        return pages

    def start_with(self, capacity: str | None) -> None:
        """Before the first request: give up what lies beyond the capacity, in tokens, to grow into later."""
        if capacity is not None:
            beyond = self._scheduler.max_total_num_tokens - self._whole_pages(int(capacity))
            self._shrink(self._allocator.get_kvcache(), max(0, beyond))

    def resize(self, command: wire.ResizeKv, rank: int, iteration: int) -> wire.KvResized:
        """Come as close to the wanted capacity as the command allows; what was done."""
        start_ns = time.monotonic_ns()
        scheduler = self._scheduler
        before, wanted = scheduler.max_total_num_tokens, self._whole_pages(command.capacity)
        pool = self._allocator.get_kvcache()
        cached = scheduler.tree_cache.evictable_size()
        preempted, released, reason = 0, 0, ""
        if wanted < before:
            floor = self._floor()
            if wanted < floor:
                wanted, reason = floor, f"a request here may need {floor} tokens"
            preempted = self._make_room(before - wanted, command.preempt)
            released = self._shrink(pool, before - wanted)
        elif wanted > before:
            reason = self.growth_obstacle or self._grow(pool, wanted - before)
        return wire.KvResized(
            rank=rank,
            nonce=command.nonce,
            iteration=iteration,
            capacity=scheduler.max_total_num_tokens,
            request_tokens_max=scheduler.request_tokens_max(),
            evicted=max(0, cached - scheduler.tree_cache.evictable_size()),
            preempted=preempted,
            released_bytes=released,
            resident_bytes=pool.resident_bytes() if hasattr(pool, "resident_bytes") else 0,
            units=pool.units() if hasattr(pool, "units") else None,
            reason=reason or self._why_not(wanted),
            duration_ns=time.monotonic_ns() - start_ns,
        )

    def tell(self, command: wire.AskMemory, rank: int, iteration: int) -> wire.KvMemory:
        """What holds KV now."""
        pool = self._allocator.get_kvcache()
        return wire.KvMemory(
            rank=rank,
            nonce=command.nonce,
            iteration=iteration,
            resident_bytes=pool.resident_bytes() if hasattr(pool, "resident_bytes") else 0,
            units=pool.units() if hasattr(pool, "units") else None,
        )

    def _whole_pages(self, tokens: int) -> int:
        return max(tokens // self._page_size, 1) * self._page_size

    def _why_not(self, wanted: int) -> str:
        return "" if self._scheduler.max_total_num_tokens == wanted else "requests hold the rest"

    def _floor(self) -> int:
        """Less would leave a request that is here already without hope."""
        demands = [
            min(len(req.origin_input_ids) + req.sampling_params.max_new_tokens, self._scheduler.max_req_len)
            for req in self._scheduler.agent.live.values()
        ]
        room: int = max(demands, default=0) + 2 * self._page_size + REQUEST_SLACK_TOKENS
        capacity: int = self._scheduler.max_total_num_tokens
        return min(capacity, -(-room // self._page_size) * self._page_size)

    def _make_room(self, tokens: int, preempt: bool) -> int:
        """Evict cached prefixes, then preempt, if allowed, until so many tokens are free; how many were preempted."""
        scheduler, allocator = self._scheduler, self._allocator
        allocator.evict_to_free_tokens(scheduler.tree_cache, tokens)
        batch, preempted = scheduler.running_batch, []
        while preempt and allocator.available_size() < tokens and scheduler.pp_group.world_size == 1:
            alive = [index for index, req in enumerate(batch.reqs) if not req.finished() and req.kv.holds_kv]
            if not alive:
                break
            order = batch._get_decode_retraction_order([batch.reqs[index] for index in alive])
            index = alive[order[-1]]
            req = batch.reqs[index]
            batch.release_req(index, len(alive) - 1)
            batch.filter_batch(keep_indices=[other for other in range(len(batch.reqs)) if other != index])
            batch.batch_is_full = False
            preempted.append(req)
            allocator.evict_to_free_tokens(scheduler.tree_cache, tokens)
        for req in preempted:
            scheduler._add_request_to_queue(req, is_retracted=True)
        return len(preempted)

    def _shrink(self, pool: Any, tokens: int) -> int:
        """Give up free pages for as many of the tokens as are free; bytes that went back."""
        allocator = self._allocator
        allocator.merge_and_sort_free()
        count = min(tokens, allocator.available_size()) // self._page_size
        free = allocator.free_pages
        given = torch.from_numpy(pick_pages(free.cpu().numpy(), count).copy())
        allocator.free_pages = free[~torch.isin(free, given)]
        self._given_up = torch.cat((self._given_up, given))
        self._set_capacity(self._scheduler.max_total_num_tokens - count * self._page_size)
        return int(pool.give_up_pages(given.numpy())) if hasattr(pool, "give_up_pages") and count else 0

    def _grow(self, pool: Any, tokens: int) -> str:
        """Take back pages that were given up; what was missing."""
        count = min(tokens // self._page_size, len(self._given_up))
        pages = np.sort(self._given_up.numpy())[:count]
        try:
            if hasattr(pool, "take_back_pages") and count:
                pool.take_back_pages(pages)
        except ArenaExhausted as error:
            return str(error)
        back = torch.from_numpy(pages)
        self._given_up = self._given_up[~torch.isin(self._given_up, back)]
        self._allocator.free_pages = torch.cat((self._allocator.free_pages, back))
        self._set_capacity(self._scheduler.max_total_num_tokens + count * self._page_size)
        return "" if count == tokens // self._page_size else "the engine was started with no more room"

    def _set_capacity(self, tokens: int) -> None:
        scheduler = self._scheduler
        scheduler.max_total_num_tokens = tokens
        for name in _HOLDERS:
            holder = getattr(scheduler, name, None)
            if hasattr(holder, "max_total_num_tokens"):
                object.__setattr__(holder, "max_total_num_tokens", tokens)
        scheduler.tp_worker.model_runner.max_total_num_tokens = tokens
        scheduler.max_req_len = min(scheduler.model_config.context_len - 1, tokens - 1)
        scheduler.max_req_input_len = scheduler.max_req_len
