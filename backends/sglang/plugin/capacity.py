"""The number of KV slots of a running scheduler, changed at one point of the request stream.

Every rank does this in the same iteration from the same state, and so gives up, or takes back, the same pages. Cached
prefixes go first. Running requests keep their memory unless the command says that they may be preempted; with several
stages it goes on over some iterations then, until no step with them is launched (`preemption.py`)."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from meshift.backends.sglang import wire
from meshift.backends.sglang.plugin.preemption import Doomed, Retractions
from meshift.kv_memory.arena import ArenaExhausted
from meshift.kv_memory.block_table import pick_pages

REQUEST_SLACK_TOKENS = 2
"""SGLang keeps the last two positions of the context, and as many slots, out of use."""

_HOLDERS = ("pool_stats_observer", "invariant_checker", "load_inquirer", "kv_events_publisher")
"""Parts of SGLang's scheduler that keep a copy of the capacity."""


TURNS_MAX = 256
"""Step boundaries at which a resize goes on."""


@dataclass(slots=True)
class _Resizing:
    """A command that is being carried out."""

    command: wire.ResizeKv
    wanted: int
    """In tokens, whole pages."""
    doomed: Doomed
    evicted: int = 0
    released: int = 0
    turns: int = 0
    duration_ns: int = 0


class KvCapacity:
    """One per scheduler. `given_up` are pages that SGLang's allocator has never seen or has been relieved of."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._allocator = scheduler.token_to_kv_pool_allocator
        self._page_size: int = self._allocator.page_size
        self._given_up = torch.empty(0, dtype=torch.int64)
        self._resizing: _Resizing | None = None
        self.growth_obstacle = ""
        """Why it may not grow now; empty if it may."""
        self._retractions: Retractions | None = None
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

    def resize(self, command: wire.ResizeKv, rank: int, iteration: int) -> list[wire.KvResized]:
        """Come as close to the wanted capacity as the command allows; answers to give. This command's is among them
        unless requests have to go of which a step is launched: `go_on` has it then."""
        answers = self._finish(rank, iteration, "another resize came") if self._resizing else []
        batches = self._scheduler.agent.batches
        self._retractions = self._retractions or Retractions(self._scheduler, batches)
        doomed = Doomed(self._scheduler, batches, self._retractions)
        self._resizing = _Resizing(command, self._whole_pages(command.capacity), doomed)
        return [*answers, *self.go_on(rank, iteration)]

    def go_on(self, rank: int, iteration: int) -> list[wire.KvResized]:
        """At every step boundary, the same on all ranks; answers to give."""
        if self._retractions:
            self._retractions.requeue()
        resizing = self._resizing
        if resizing is None:
            return []
        begun_ns = time.monotonic_ns()
        change = resizing.wanted - self._scheduler.max_total_num_tokens
        if change > 0:
            reason: str | None = self.growth_obstacle or self._grow(self._allocator.get_kvcache(), change)
        else:
            reason = self._make_room(resizing)
        if self._retractions:
            self._retractions.requeue()
        resizing.duration_ns += time.monotonic_ns() - begun_ns
        return [] if reason is None else self._finish(rank, iteration, reason)

    @property
    def has_work(self) -> bool:
        """Whether `go_on` has anything to do."""
        return self._resizing is not None or bool(self._retractions)

    def is_preempting(self, req: Any) -> bool:
        """Whether it is in no batch any more, and not in the queue yet."""
        return self._retractions is not None and req in self._retractions

    def _finish(self, rank: int, iteration: int, reason: str) -> list[wire.KvResized]:
        scheduler, pool, resizing = self._scheduler, self._allocator.get_kvcache(), self._resizing
        assert resizing is not None
        self._resizing = None
        is_reached = scheduler.max_total_num_tokens == resizing.wanted
        return [
            wire.KvResized(
                rank=rank,
                nonce=resizing.command.nonce,
                iteration=iteration,
                capacity=scheduler.max_total_num_tokens,
                request_tokens_max=scheduler.request_tokens_max(),
                evicted=resizing.evicted,
                preempted=resizing.doomed.preempted,
                released_bytes=resizing.released,
                resident_bytes=pool.resident_bytes() if hasattr(pool, "resident_bytes") else 0,
                units=pool.units() if hasattr(pool, "units") else None,
                reason="" if is_reached else reason or "requests hold the rest",
                duration_ns=resizing.duration_ns,
            )
        ]

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

    def _floor(self) -> int:
        """Less would leave a request that is here already without hope."""
        demands = [
            min(len(req.origin_input_ids) + req.sampling_params.max_new_tokens, self._scheduler.max_req_len)
            for req in self._scheduler.agent.live.values()
        ]
        room: int = max(demands, default=0) + 2 * self._page_size + REQUEST_SLACK_TOKENS
        capacity: int = self._scheduler.max_total_num_tokens
        return min(capacity, -(-room // self._page_size) * self._page_size)

    def _make_room(self, resizing: "_Resizing") -> str | None:
        """Give up pages: free ones, then cached prefixes', then, if allowed, those of requests. Why it isn't more;
        None: more will go at later boundaries."""
        floor = self._floor()
        tokens = self._scheduler.max_total_num_tokens - max(resizing.wanted, floor)
        resizing.turns += 1
        waits = False
        if self._missing(resizing, tokens) > 0 and resizing.command.preempt:
            waits = resizing.doomed.go(lambda: self._missing(resizing, tokens))
        # What is free goes at once, or those who wait would have it.
        resizing.released += self._shrink(self._allocator.get_kvcache(), tokens) if tokens > 0 else 0
        if waits and self._scheduler.max_total_num_tokens > max(resizing.wanted, floor):
            return None if resizing.turns < TURNS_MAX else ""
        return f"a request here may need {floor} tokens" if floor > resizing.wanted else ""

    def _missing(self, resizing: "_Resizing", tokens: int) -> int:
        """How many of the tokens neither are free nor can be, by evicting cached prefixes, which is done."""
        tree, allocator = self._scheduler.tree_cache, self._allocator
        cached = tree.evictable_size()
        allocator.evict_to_free_tokens(tree, tokens)
        resizing.evicted += cached - tree.evictable_size()
        return tokens - int(allocator.available_size())

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
