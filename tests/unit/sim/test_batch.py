"""Segment and page arithmetic against counting step by step."""

import random

import pytest

from meshift.backends.sim.batch import NEVER, DecodeBatch, Segment
from meshift.backends.sim.parameters import SimParameters, StepCost
from meshift.backends.sim.request import SimRequest
from meshift.backends.sim.tokens import Generation, TokenSource
from meshift.schemas.identity import RequestKey
from meshift.schemas.requests import Priority, Sampling

SOURCE = TokenSource(3, 32_000, 2, 0)
SEEDS = range(20)


def make_request(number: int, computed: int, left: int) -> SimRequest:
    sampling = Sampling(max_new_tokens=left + 1, temperature=0.0)
    request = SimRequest(RequestKey(str(number), 1, 0), Generation(SOURCE, [1], (), sampling), Priority())
    request.computed, request.generated = computed, 1
    return request


@pytest.mark.parametrize("seed", SEEDS)
def test_completed_steps_are_those_counted_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    segment = Segment(rng.randrange(1000), rng.randrange(1, 50), rng.choice((0, 0, 1, 7)), rng.randrange(1, 40))
    ends = []
    at = segment.start_ns
    for step in range(segment.steps):
        at += segment.first_ns + step * segment.growth_ns
        ends.append(at)
    assert segment.end_ns == ends[-1]
    for now_ns in range(segment.start_ns, segment.end_ns + 3):
        expected = min(segment.steps - 1, sum(end <= now_ns for end in ends))
        assert segment.completed(now_ns) == expected, f"seed {seed} at {now_ns}"
    for done in range(segment.steps):
        assert segment.last_step(done).end_ns == ends[done]


@pytest.mark.parametrize("seed", SEEDS)
def test_pages_are_those_counted_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    parameters = SimParameters(page_size=rng.choice((1, 3, 16)))
    batch, computed = DecodeBatch(parameters), []
    for number in range(rng.randrange(1, 12)):
        batch.advance(rng.randrange(20))
        request = make_request(number, rng.randrange(1, 100), 10_000)
        batch.add(request)
    computed = [batch.computed(request) for request in batch]
    taken = [sum((count + step) % parameters.page_size == 0 for count in computed) for step in range(120)]
    for _ in range(50):
        skipped, steps = rng.randrange(60), rng.randrange(60)
        assert batch.pages_needed(skipped, steps) == sum(taken[skipped : skipped + steps]), f"seed {seed}"
    batch.check()


@pytest.mark.parametrize("seed", SEEDS)
def test_steps_possible_is_the_most_that_fits(seed: int) -> None:
    rng = random.Random(seed)
    batch = DecodeBatch(SimParameters())
    for number in range(rng.randrange(1, 12)):
        batch.add(make_request(number, rng.randrange(1, 100), rng.randrange(1, 200)))
    for extra in range(60):
        free = batch.pages_needed(0, 1) + extra
        steps = batch.steps_possible(free)
        most = batch.next_finish - batch.steps
        assert 1 <= steps <= most
        assert batch.pages_needed(0, steps) <= free
        assert steps == most or batch.pages_needed(0, steps + 1) > free, f"seed {seed}"


def test_members_come_and_go() -> None:
    batch = DecodeBatch(SimParameters())
    first, second, third = make_request(1, 10, 5), make_request(2, 20, 8), make_request(3, 30, 8)
    for number, request in enumerate((first, third, second)):
        request.admitted_ns = number
        batch.add(request)
    assert batch.newest() is second
    assert (batch.tokens, batch.next_finish) == (60, 5)
    batch.advance(5)
    assert batch.finished() == [first]
    batch.remove(first)
    assert (first.computed, first.generated) == (15, 6)
    assert (batch.tokens, batch.next_finish) == (60, 8)
    batch.remove(second)
    batch.advance(3)
    assert batch.finished() == [third]
    batch.remove(third)
    assert (len(batch), batch.tokens, batch.next_finish) == (0, 0, NEVER)
    batch.check()


def test_segment_of_a_batch() -> None:
    batch = DecodeBatch(SimParameters())
    batch.add(make_request(1, 10, 5))
    assert batch.segment(7, StepCost(1_000, 100, 3, 50), 4) == Segment(7, 1_000 + 100 + 30, 3, 4), "it is alone"
    batch.add(make_request(2, 20, 5))
    segment = batch.segment(7, StepCost(1_000, 100, 3, 50), 4)
    assert segment == Segment(7, 1_000 + 50 + 200 + 90, 6, 4)
    assert segment.duration(3) == 1_340 + 1_346 + 1_352


def test_check_finds_a_wrong_counter() -> None:
    batch = DecodeBatch(SimParameters())
    request = make_request(1, 10, 5)
    batch.add(request)
    request.computed += 1
    with pytest.raises(AssertionError):
        batch.check()
