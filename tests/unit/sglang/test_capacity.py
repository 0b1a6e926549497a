"""The capacity of a scheduler made of as much as the code touches: what goes first, what stays, what is said."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from meshift.backends.sglang import wire  # noqa: E402
from meshift.backends.sglang.plugin.capacity import REQUEST_SLACK_TOKENS, KvCapacity  # noqa: E402
from meshift.kv_memory.arena import ArenaExhausted  # noqa: E402

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

    def evictable_size(self) -> int:
        return len(self.pages) * PAGE


class Batch:
    """Running requests; the last one is preempted first."""

    def __init__(self, allocator: Allocator) -> None:
        self.reqs: list[Any] = []
        self.allocator = allocator
        self.batch_is_full = True

    def _get_decode_retraction_order(self, reqs: list[Any]) -> list[int]:
        return list(range(len(reqs)))

    def release_req(self, index: int, remaining: int) -> None:
        pages = self.reqs[index].pages
        self.allocator.free_pages = torch.cat((self.allocator.free_pages, torch.tensor(pages)))

    def filter_batch(self, keep_indices: list[int]) -> None:
        self.reqs = [self.reqs[index] for index in keep_indices]


class Scheduler:
    """The rest of it."""

    def __init__(self) -> None:
        self.tree_cache = Tree()
        self.token_to_kv_pool_allocator = Allocator(Pool(), self.tree_cache)
        self.max_total_num_tokens = PAGES * PAGE
        self.max_req_len = min(CONTEXT, PAGES * PAGE) - 1
        self.max_req_input_len = self.max_req_len
        self.model_config = SimpleNamespace(context_len=CONTEXT)
        self.running_batch = Batch(self.token_to_kv_pool_allocator)
        self.pp_group = SimpleNamespace(world_size=1)
        self.pool_stats_observer = SimpleNamespace(max_total_num_tokens=PAGES * PAGE)
        self.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(max_total_num_tokens=PAGES * PAGE))
        self.queued: list[Any] = []
        self.agent = SimpleNamespace(live={})

    def request_tokens_max(self) -> int:
        return min(CONTEXT, self.max_total_num_tokens - 2 * PAGE) - REQUEST_SLACK_TOKENS

    def _add_request_to_queue(self, req: Any, is_retracted: bool) -> None:
        assert is_retracted
        self.queued.append(req)

    def run(self, pages: int, demand: int) -> None:
        """A request that holds pages and may need so many tokens."""
        req = SimpleNamespace(
            pages=self.token_to_kv_pool_allocator.take(pages),
            origin_input_ids=[0] * (demand // 2),
            sampling_params=SimpleNamespace(max_new_tokens=demand - demand // 2),
            finished=lambda: False,
            kv=SimpleNamespace(holds_kv=True),
        )
        self.running_batch.reqs.append(req)
        self.agent.live[str(len(self.agent.live))] = req

    def cache(self, pages: int) -> None:
        self.tree_cache.pages += self.token_to_kv_pool_allocator.take(pages)


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler()


@pytest.fixture
def capacity(scheduler: Scheduler) -> KvCapacity:
    return KvCapacity(scheduler)


def resize(capacity: KvCapacity, tokens: int, preempt: bool = False) -> wire.KvResized:
    """Resize, and check the books."""
    scheduler: Any = capacity._scheduler
    answer = capacity.resize(wire.ResizeKv(nonce=5, capacity=tokens, preempt=preempt), rank=2, iteration=9)
    assert (answer.rank, answer.nonce, answer.iteration) == (2, 5, 9)
    check(scheduler, answer.capacity)
    return answer


def check(scheduler: Any, expected: int) -> None:
    """Every page is in one place, and all that know the capacity agree."""
    held = [page for req in scheduler.running_batch.reqs for page in req.pages]
    free = scheduler.token_to_kv_pool_allocator.free_pages.tolist()
    gone = scheduler.token_to_kv_pool_allocator.pool.gone
    assert sorted([*held, *free, *scheduler.tree_cache.pages, *gone]) == list(range(1, PAGES + 1))
    assert scheduler.max_total_num_tokens == expected == (PAGES - len(gone)) * PAGE
    assert scheduler.pool_stats_observer.max_total_num_tokens == expected
    assert scheduler.tp_worker.model_runner.max_total_num_tokens == expected
    assert scheduler.max_req_len == scheduler.max_req_input_len == min(CONTEXT, expected) - 1


def test_down_and_up(capacity: KvCapacity, scheduler: Scheduler) -> None:
    down = resize(capacity, 83)
    assert (down.capacity, down.released_bytes, down.reason) == (80, 3000, "")
    assert down.request_tokens_max == 80 - 2 * PAGE - REQUEST_SLACK_TOKENS
    assert min(scheduler.token_to_kv_pool_allocator.pool.gone) == 21
    up = resize(capacity, 120)
    assert (up.capacity, up.released_bytes, up.reason) == (120, 0, "")
    beyond = resize(capacity, 9999)
    assert beyond.capacity == PAGES * PAGE
    assert "no more room" in beyond.reason
    assert resize(capacity, 1).capacity >= PAGE


def test_prefixes_go_before_requests(capacity: KvCapacity, scheduler: Scheduler) -> None:
    scheduler.run(pages=20, demand=90)
    scheduler.cache(25)
    first = resize(capacity, 120)
    assert (first.capacity, first.evicted, first.preempted, first.reason) == (120, 60, 0, "")
    second = resize(capacity, 100)
    assert (second.capacity, second.evicted, second.preempted) == (100, 20, 0)


def test_requests_go_only_when_told(capacity: KvCapacity, scheduler: Scheduler) -> None:
    for _ in range(4):
        scheduler.run(pages=10, demand=60)
    kept = resize(capacity, 80)
    assert (kept.capacity, kept.preempted, kept.reason) == (160, 0, "requests hold the rest")
    forced = resize(capacity, 80, preempt=True)
    assert (forced.capacity, forced.preempted, forced.reason) == (80, 2, "")
    assert len(scheduler.queued) == 2
    assert scheduler.running_batch.batch_is_full is False


def test_no_preemption_across_stages(capacity: KvCapacity, scheduler: Scheduler) -> None:
    scheduler.pp_group.world_size = 2
    scheduler.run(pages=40, demand=60)
    assert resize(capacity, 80, preempt=True).preempted == 0


def test_never_below_what_a_request_may_need(capacity: KvCapacity, scheduler: Scheduler) -> None:
    scheduler.run(pages=3, demand=101)
    answer = resize(capacity, 40, preempt=True)
    assert answer.capacity >= 101 + 2 * PAGE
    assert answer.request_tokens_max >= 101
    assert f"may need {answer.capacity}" in answer.reason


def test_a_system_without_memory(capacity: KvCapacity, scheduler: Scheduler) -> None:
    resize(capacity, 80)
    scheduler.token_to_kv_pool_allocator.pool.full = True
    answer = resize(capacity, 160)
    assert (answer.capacity, answer.reason) == (80, "no memory")


def test_a_flush_brings_nothing_back(capacity: KvCapacity, scheduler: Scheduler) -> None:
    capacity.start_with("80")
    check(scheduler, 80)
    scheduler.token_to_kv_pool_allocator.clear()
    check(scheduler, 80)
    capacity.start_with(None)
    check(scheduler, 80)


def test_random_sequences() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    for _ in range(40):
        scheduler = Scheduler()
        capacity = KvCapacity(scheduler)
        for _ in range(20):
            free = len(scheduler.token_to_kv_pool_allocator.free_pages)
            if dice.random() < 0.5 and free:
                pages = dice.randint(1, free)
                if dice.random() < 0.5:
                    scheduler.cache(pages)
                else:
                    scheduler.run(pages, pages * PAGE)
            before, running = scheduler.max_total_num_tokens, len(scheduler.running_batch.reqs)
            wanted = dice.randint(1, PAGES * PAGE)
            answer = resize(capacity, wanted, preempt=dice.random() < 0.3)
            assert running - len(scheduler.running_batch.reqs) == answer.preempted
            assert min(before, wanted) // PAGE * PAGE <= answer.capacity <= max(before, wanted, PAGE)
            assert bool(answer.reason) == (answer.capacity != max(wanted // PAGE, 1) * PAGE)


def test_what_holds_kv(capacity: KvCapacity) -> None:
    told = capacity.tell(wire.AskMemory(nonce=5), rank=2, iteration=9)
    assert told == wire.KvMemory(rank=2, nonce=5, iteration=9, resident_bytes=7, units=None)
