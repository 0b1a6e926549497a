"""The capacity of a scheduler made of as much as the code touches: what goes first, what stays, what is said."""

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from meshift.backends.sglang import wire  # noqa: E402
from meshift.backends.sglang.plugin.capacity import REQUEST_SLACK_TOKENS, TURNS_MAX, KvCapacity  # noqa: E402
from tests.unit.sglang.fake_scheduler import CONTEXT, PAGE, PAGES, Scheduler  # noqa: E402


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler()


@pytest.fixture
def capacity(scheduler: Scheduler) -> KvCapacity:
    return KvCapacity(scheduler)


def resize(capacity: KvCapacity, tokens: int, preempt: bool = False) -> wire.KvResized:
    """Resize, and check the books."""
    scheduler: Any = capacity._scheduler
    (answer,) = capacity.resize(wire.ResizeKv(nonce=5, capacity=tokens, preempt=preempt), rank=2, iteration=9)
    assert not capacity.has_work
    assert (answer.rank, answer.nonce, answer.iteration) == (2, 5, 9)
    check(scheduler, answer.capacity)
    return answer


def check(scheduler: Any, expected: int) -> None:
    """Every page is in one place, and all that know the capacity agree."""
    held = [page for batch in scheduler.batches.batches for req in batch.reqs for page in req.pages]
    free = scheduler.token_to_kv_pool_allocator.free_pages.tolist()
    gone = scheduler.token_to_kv_pool_allocator.pool.gone
    assert sorted([*held, *free, *scheduler.tree_cache.pages, *scheduler.tree_cache.locked, *gone]) == list(
        range(1, PAGES + 1)
    )
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


class Staged:
    """A resize of two micro-batches that goes on at each turn."""

    def __init__(self, *micro_batches: int) -> None:
        self.scheduler = Scheduler(micro_batches=2)
        self.capacity = KvCapacity(self.scheduler)
        self.reqs = [self.scheduler.run(pages=5, demand=24, micro_batch=which) for which in micro_batches]
        self.iteration = 9
        self.gone: list[list[int]] = []
        """Who was preempted at each turn."""

    def begin(self, tokens: int, nonce: int = 5) -> list[wire.KvResized]:
        command = wire.ResizeKv(nonce=nonce, capacity=tokens, preempt=True)
        return self.noted(self.capacity.resize(command, 2, self.iteration))

    def turn(self) -> list[wire.KvResized]:
        self.scheduler.turn()
        self.iteration += 1
        return self.noted(self.capacity.go_on(2, self.iteration))

    def noted(self, answers: list[wire.KvResized]) -> list[wire.KvResized]:
        before = [number for turn in self.gone for number in turn]
        self.gone.append(sorted(req.number for req in self.scheduler.queued if req.number not in before))
        check(self.scheduler, self.scheduler.max_total_num_tokens)
        return answers


def test_with_stages_each_goes_at_the_turn_of_its_micro_batch() -> None:
    staged = Staged(0, 1, 1, 0, 1, 0)
    assert staged.begin(40) == []
    assert staged.gone == [[3, 5]]
    assert staged.capacity.has_work
    assert staged.scheduler.max_total_num_tokens == 80, "what is free goes at once"
    (answer,) = staged.turn()
    assert staged.gone == [[3, 5], [2, 4]]
    assert (answer.capacity, answer.preempted, answer.iteration, answer.reason) == (40, 4, 10, "")
    assert answer.released_bytes == 40 * 100
    assert not staged.capacity.has_work
    assert staged.turn() == []
    assert staged.scheduler.max_total_num_tokens == 40


def test_who_ends_meanwhile_need_not_go() -> None:
    staged = Staged(0, 1, 0, 1)
    scheduler = staged.scheduler
    assert staged.begin(40) == []
    assert staged.gone == [[2]], "3 is launched"
    ended = scheduler.batches.batches[1].reqs.pop()
    assert ended is staged.reqs[3]
    scheduler.token_to_kv_pool_allocator.free_pages = torch.tensor(ended.pages)
    (answer,) = staged.turn()
    assert (answer.capacity, answer.preempted, answer.reason) == (40, 1, "")


def test_who_is_chosen_and_gets_away_is_replaced() -> None:
    """Its memory isn't free, as that of a request that freezes for a move."""
    staged = Staged(0, 1, 0, 1)
    scheduler = staged.scheduler
    assert staged.begin(40) == []
    frozen = scheduler.batches.batches[1].reqs.pop()
    scheduler.tree_cache.locked = frozen.pages
    (answer,) = staged.turn()
    assert staged.gone == [[2], [1]]
    assert (answer.capacity, answer.preempted, answer.reason) == (40, 2, "")


def test_nobody_is_left_who_could_go() -> None:
    staged = Staged(0, 1, 1)
    staged.scheduler.batches.prefilling += staged.reqs[:2]
    assert staged.begin(36) == []
    (answer,) = staged.turn()
    assert (answer.capacity, answer.preempted, answer.reason) == (40, 1, "requests hold the rest")


def test_another_resize_ends_one_that_goes_on() -> None:
    staged = Staged(0, 1, 1, 1)
    assert staged.begin(40, nonce=5) == []
    first, second = staged.begin(PAGES * PAGE, nonce=6)
    assert (first.nonce, first.capacity, first.reason) == (5, 80, "another resize came")
    assert (second.nonce, second.capacity, second.reason) == (6, PAGES * PAGE, "")


def test_it_ends_even_if_the_turn_never_comes() -> None:
    staged = Staged(1, 1)
    answers = staged.begin(36)
    turns = 1
    while not answers:
        turns += 1
        answers = staged.noted(staged.capacity.go_on(2, staged.iteration))
    assert turns == TURNS_MAX
    assert answers[0].reason == "requests hold the rest"


def test_an_overlapping_step_ends_before_its_request_waits() -> None:
    """Prefilled at once, it would get the token of the step that is launched."""
    scheduler = Scheduler()
    capacity = KvCapacity(scheduler)
    reqs = [scheduler.run(pages=10, demand=60) for _ in range(4)]
    scheduler.batches.launched += reqs
    (answer,) = capacity.resize(wire.ResizeKv(nonce=5, capacity=80, preempt=True), 0, 1)
    assert (answer.capacity, answer.preempted) == (80, 2)
    assert scheduler.queued == []
    assert capacity.has_work
    assert [capacity.is_preempting(req) for req in reqs] == [False, False, True, True]
    assert capacity.go_on(0, 1) == []
    assert scheduler.queued == []
    scheduler.batches.launched.clear()
    assert capacity.go_on(0, 2) == []
    assert scheduler.queued == [reqs[3], reqs[2]]
    assert not capacity.has_work
    assert not capacity.is_preempting(reqs[3])


def test_all_ranks_do_the_same() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    for number in range(40):
        ends = []
        for _ in range(2):
            dice = random.Random(seed + number)
            staged = Staged(*(dice.randrange(2) for _ in range(dice.randint(1, 10))))
            answers = staged.begin(dice.randint(4, 200))
            while not answers:
                answers = staged.turn()
            assert len(staged.gone) <= 3, "one round of the loop is enough"
            ends.append((staged.gone, answers[0].capacity, answers[0].preempted, answers[0].reason))
        assert ends[0] == ends[1]


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
