"""As much of SGLang's scheduler, its allocator and batches as the capacity of KV memory touches."""

from types import SimpleNamespace
from typing import Any

import torch

from meshift.backends.sglang.plugin.capacity import REQUEST_SLACK_TOKENS
from meshift.kv_memory.arena import ArenaExhausted

PAGE, PAGES = 4, 50
CONTEXT = 1000


class Pool:
    """Keeps the books of what was given back."""

    def __init__(self) -> None:
        self.gone: set[int] = set()
        self.full = False

    def give_up_pages(self, pages: Any) -> int:
        assert not self.gone & set(pages.tolist())
        self.gone |= set(pages.tolist())
        return len(pages) * 100

    def take_back_pages(self, pages: Any) -> None:
        if self.full:
            raise ArenaExhausted("no memory")
        assert self.gone >= set(pages.tolist())
        self.gone -= set(pages.tolist())

    def resident_bytes(self) -> int:
        return 7


class Allocator:
    """As SGLang's, of pages 1 to PAGES."""

    page_size = PAGE

    def __init__(self, pool: Pool, tree: "Tree") -> None:
        self.pool, self.tree = pool, tree
        self.clear()

    def clear(self) -> None:
        self.free_pages = torch.arange(1, PAGES + 1)

    def available_size(self) -> int:
        return len(self.free_pages) * PAGE

    def merge_and_sort_free(self) -> None:
        """Nothing is staged."""

    def get_kvcache(self) -> Pool:
        return self.pool

    def evict_to_free_tokens(self, tree: "Tree", tokens: int) -> None:
        while tree.pages and self.available_size() < tokens:
            self.free_pages = torch.cat((self.free_pages, torch.tensor([tree.pages.pop()])))

    def take(self, count: int) -> list[int]:
        pages: list[int] = self.free_pages[:count].tolist()
        self.free_pages = self.free_pages[count:]
        return pages


class Tree:
    """Cached pages."""

    def __init__(self) -> None:
        self.pages: list[int] = []
        self.locked: list[int] = []

    def evictable_size(self) -> int:
        return len(self.pages) * PAGE


class Batch:
    """Running requests of a micro-batch; the last one is preempted first."""

    def __init__(self, allocator: Allocator) -> None:
        self.reqs: list[Any] = []
        self.allocator = allocator
        self.batch_is_full = True

    def _get_decode_retraction_order(self, reqs: list[Any]) -> list[int]:
        return sorted(range(len(reqs)), key=lambda index: reqs[index].number)

    def release_req(self, index: int, remaining: int) -> None:
        assert remaining == 0
        req = self.reqs[index]
        pages, req.pages, req.kv.holds_kv = req.pages, [], False
        self.allocator.free_pages = torch.cat((self.allocator.free_pages, torch.tensor(pages)))


class Batches:
    """Micro-batches, of which all but the current one are launched."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches
        self.current = 0
        self.prefilling: list[Any] = []
        self.launched: list[Any] = []
        """Those of which the overlap scheduler has launched a step."""

    def running(self) -> list[Batch]:
        return self.batches

    def can_leave(self, req: Any) -> bool:
        return req in self.batches[self.current].reqs

    def is_launched(self, req: Any) -> bool:
        return req in self.launched or any(req in batch.reqs for batch in self.batches[1:])

    def is_in_prefill(self, req: Any) -> bool:
        return req in self.prefilling

    def remove(self, req: Any) -> None:
        assert self.can_leave(req)
        self.batches[self.current].reqs.remove(req)
        self.batches[self.current].batch_is_full = False


class Scheduler:
    """The rest of it."""

    def __init__(self, micro_batches: int = 1) -> None:
        self.tree_cache = Tree()
        self.token_to_kv_pool_allocator = Allocator(Pool(), self.tree_cache)
        self.max_total_num_tokens = PAGES * PAGE
        self.max_req_len = min(CONTEXT, PAGES * PAGE) - 1
        self.max_req_input_len = self.max_req_len
        self.model_config = SimpleNamespace(context_len=CONTEXT)
        self.batches = Batches([Batch(self.token_to_kv_pool_allocator) for _ in range(micro_batches)])
        self.running_batch = self.batches.batches[0]
        self.pool_stats_observer = SimpleNamespace(max_total_num_tokens=PAGES * PAGE)
        self.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(max_total_num_tokens=PAGES * PAGE))
        self.queued: list[Any] = []
        self.agent = SimpleNamespace(live={}, batches=self.batches)

    def request_tokens_max(self) -> int:
        return min(CONTEXT, self.max_total_num_tokens - 2 * PAGE) - REQUEST_SLACK_TOKENS

    def _add_request_to_queue(self, req: Any, is_retracted: bool) -> None:
        assert is_retracted
        self.queued.append(req)

    def turn(self) -> None:
        """The next micro-batch has its turn."""
        self.batches.current = (self.batches.current + 1) % len(self.batches.batches)
        self.running_batch = self.batches.batches[self.batches.current]

    def run(self, pages: int, demand: int, micro_batch: int = 0) -> Any:
        """A request that holds pages and may need so many tokens."""
        req = SimpleNamespace(
            pages=self.token_to_kv_pool_allocator.take(pages),
            origin_input_ids=[0] * (demand // 2),
            sampling_params=SimpleNamespace(max_new_tokens=demand - demand // 2),
            finished=lambda: False,
            kv=SimpleNamespace(holds_kv=True, kv_allocated_len=pages * PAGE, cache_protected_len=0),
            output_ids=[1],
            number=len(self.agent.live),
        )
        self.batches.batches[micro_batch].reqs.append(req)
        self.agent.live[str(req.number)] = req
        return req

    def cache(self, pages: int) -> None:
        self.tree_cache.pages += self.token_to_kv_pool_allocator.take(pages)
