"""Pages, queue, tables: the small parts."""

import itertools
import random
from collections.abc import Callable

import pytest

from meshift.backends.bounded import BoundedSet
from meshift.backends.sim.lifecycle import (
    TRANSITIONS,
    ImpossibleTransition,
    RequestEvent,
    RequestState,
    next_state,
)
from meshift.backends.sim.pages import PagePool
from meshift.backends.sim.parameters import SimParameters
from meshift.backends.sim.request import SimRequest
from meshift.backends.sim.table import RequestTable
from meshift.backends.sim.tokens import Generation, TokenSource
from meshift.backends.sim.waiting import WaitingQueue
from meshift.schemas.identity import RequestKey
from meshift.schemas.requests import Priority, Sampling


def make_request(number: int, prompt: int = 10, priority: int = 0) -> SimRequest:
    generation = Generation(TokenSource(3, 32_000, 2, 0), [1] * prompt, (), Sampling(max_new_tokens=5))
    request = SimRequest(RequestKey(f"r{number}", 1, 0), generation, Priority(scheduling=priority))
    request.sequence = number
    return request


@pytest.mark.parametrize(("state", "event"), list(itertools.product(RequestState, RequestEvent)))
def test_every_pair_is_in_the_table_or_raises(state: RequestState, event: RequestEvent) -> None:
    if (state, event) in TRANSITIONS:
        assert next_state(state, event) is TRANSITIONS[state, event]
    else:
        with pytest.raises(ImpossibleTransition):
            next_state(state, event)


def test_every_state_is_left_and_gone_is_not() -> None:
    left = {state for state, _ in TRANSITIONS}
    assert left == set(RequestState) - {RequestState.GONE}
    assert set(TRANSITIONS.values()) == set(RequestState)


def test_pages_go_round() -> None:
    pool = PagePool(10)
    pool.take(3)
    pool.reserve(4)
    assert (pool.used, pool.reserved, pool.free) == (3, 4, 3)
    pool.spend(2)
    pool.unreserve(2)
    pool.give(5)
    assert (pool.used, pool.reserved, pool.free) == (0, 0, 10)


def test_pages_that_are_not_there_are_a_bug() -> None:
    acts: list[Callable[[PagePool], None]] = [
        lambda pool: pool.take(11),
        lambda pool: pool.give(1),
        lambda pool: pool.reserve(11),
        lambda pool: pool.unreserve(1),
        lambda pool: pool.spend(1),
    ]
    for act in acts:
        with pytest.raises(AssertionError):
            act(PagePool(10))


def test_queue_is_by_priority_then_arrival() -> None:
    queue = WaitingQueue(SimParameters())
    arrivals = [(0, 5), (1, 9), (0, 3), (-1, 1), (1, 7)]
    requests = [make_request(number, priority=priority) for number, (priority, _) in enumerate(arrivals)]
    for request, (_, arrived_ns) in zip(requests, arrivals, strict=True):
        request.arrived_ns = arrived_ns
        queue.add(request)
    assert [queue.pop().sequence for _ in range(5)] == [4, 1, 2, 0, 3]


def test_queue_knows_its_demand() -> None:
    rng = random.Random(3)
    queue = WaitingQueue(SimParameters())
    inside: list[SimRequest] = []
    for number in range(200):
        if inside and rng.random() < 0.4:
            request = inside.pop(rng.randrange(len(inside)))
            queue.remove(request)
        else:
            request = make_request(number, prompt=rng.randrange(1, 90), priority=rng.randrange(3))
            request.arrived_ns = rng.randrange(5)
            inside.append(request)
            queue.add(request)
        assert queue.demand == sum(queue.pages_of(request) for request in inside)
        assert queue.head_demand == (queue.pages_of(queue.head) if queue.head else 0)
        assert sorted(request.sequence for request in queue) == sorted(request.sequence for request in inside)


def test_bounded_set_forgets_the_oldest() -> None:
    things: BoundedSet[int] = BoundedSet(3)
    for thing in (1, 2, 3, 1, 4):
        things.add(thing)
    assert [thing in things for thing in (1, 2, 3, 4)] == [True, False, True, True]
    assert len(things) == 3


def test_table_remembers_keys() -> None:
    table = RequestTable()
    request = make_request(1)
    table.add(request)
    old, new = request.key, request.key._replace(attempt=2)
    table.rekey(request, new)
    assert table.get(old) is None
    assert table.get(new) is request
    table.remove(request)
    assert not len(table)
    assert table.has_seen(old)
    assert table.has_seen(new)
    assert not table.has_seen(new._replace(hop=1))
