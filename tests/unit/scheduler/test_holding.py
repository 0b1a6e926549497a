"""Dispatches that wait at the scheduler."""

import asyncio
from typing import Any

import pytest

from meshift.schemas.errors import Unavailable
from meshift.schemas.identity import FrontendRef, Owner
from meshift.schemas.instances import DispatchRequest
from meshift.schemas.requests import Priority
from meshift.services.scheduler import holding
from meshift.services.scheduler.holding import (
    ASK_AGAIN_S,
    CROWD_ASK_AGAIN_S,
    CROWD_ASK_AGAIN_S_MAX,
    CROWD_ASKS_PER_S,
    Holding,
)
from meshift.services.scheduler.policy.demand import HeldDemand
from meshift.services.scheduler.policy.dispatch import DispatchDecision, choose_instance
from meshift.services.scheduler.policy.waiting import WaitingLine
from meshift.services.simulation import virtual_time
from tests.unit.scheduler.kit import instance, settings


class Room:
    """An instance with so much room, that others fill."""

    def __init__(self, room: int = 0) -> None:
        self.room = room
        self.order: list[str] = []
        self.decisions = 0
        self.error: Exception | None = None

    def decide(self, request: DispatchRequest) -> DispatchDecision:
        self.decisions += 1
        if self.error is not None:
            raise self.error
        waits: dict[str, Any] = {"waiting": 1, "queued_demand": 0, "head_demand": 0}
        loads = [instance("a", used=1000 - self.room, running=1, **waits)]
        decision = choose_instance(loads, request.demand, 0, settings())
        assert decision is not None
        if decision.owner is not None:
            self.room -= request.demand
            self.order.append(request.request_id)
        return decision


def ask(name: str, demand: int, priority: int = 0, waited_s: float = 0.0) -> DispatchRequest:
    return DispatchRequest(
        request_id=name,
        attempt=1,
        frontend=FrontendRef("f", 1),
        model="m",
        demand=demand,
        priority=Priority(scheduling=priority),
        may_wait=True,
        waited_s=waited_s,
    )


def test_the_line_is_by_priority_then_arrival_then_the_order_of_asking() -> None:
    line: WaitingLine[str] = WaitingLine()
    places = [
        line.add(name, priority, arrival_s)
        for name, priority, arrival_s in (("late", 0, 9.0), ("early", 0, 1.0), ("high", 1, 8.0), ("late too", 0, 9.0))
    ]
    assert [place.item for place in line] == ["high", "early", "late", "late too"]
    line.remove(places[1])
    line.remove(places[1])
    assert [place.item for place in line] == ["high", "late", "late too"]
    assert len(line) == 3


def test_who_waited_longest_is_placed_first_and_a_smaller_one_may_pass() -> None:
    async def main() -> list[str]:
        room = Room()
        line = Holding(room.decide)
        waits = [ask("new", 100), ask("large", 500, waited_s=5.0), ask("old", 100, waited_s=3.0), ask("high", 100, 1)]
        tasks = [asyncio.create_task(line.wait(request, 10.0, 1.0)) for request in waits]
        await asyncio.sleep(0.1)
        assert len(line) == 4
        room.room = 250
        line.pump()
        placed = await asyncio.gather(*tasks)
        assert [isinstance(decision, DispatchDecision) for decision in placed] == [False, False, True, True]
        assert len(line) == 0
        return room.order

    assert virtual_time.run(main()) == ["high", "old"]


def test_larger_ones_are_not_even_looked_at_once_a_smaller_one_found_nothing() -> None:
    async def main() -> int:
        room = Room()
        line = Holding(room.decide)
        tasks = [asyncio.create_task(line.wait(ask(str(demand), demand), 0.0, 1.0)) for demand in (500, 300, 400, 600)]
        await asyncio.sleep(0.1)
        line.pump()
        await asyncio.gather(*tasks)
        return room.decisions

    assert virtual_time.run(main()) == 2


def test_after_its_time_it_is_told_to_ask_again() -> None:
    async def main() -> float:
        line = Holding(Room().decide)
        assert await line.wait(ask("a", 100), 0.0, 0.25) == ASK_AGAIN_S
        assert len(line) == 0
        return asyncio.get_running_loop().time()

    assert virtual_time.run(main()) == 0.25


def test_all_are_told_when_the_scheduler_stops() -> None:
    async def main() -> float:
        line = Holding(Room().decide)
        task = asyncio.create_task(line.wait(ask("a", 100), 0.0, 9.0))
        await asyncio.sleep(0.1)
        line.release()
        assert await task == ASK_AGAIN_S
        return asyncio.get_running_loop().time()

    assert virtual_time.run(main()) == 0.1


def test_a_full_line_gives_up_its_last(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        line = Holding(Room().decide)
        first = asyncio.create_task(line.wait(ask("first", 100, waited_s=1.0), 5.0, 9.0))
        last = asyncio.create_task(line.wait(ask("last", 100), 5.0, 9.0))
        await asyncio.sleep(0)
        high = asyncio.create_task(line.wait(ask("high", 100, 1), 5.0, 9.0))
        assert await last == pytest.approx(CROWD_ASK_AGAIN_S + 1 / CROWD_ASKS_PER_S)
        assert not first.done()
        assert not high.done()
        line.release()
        await asyncio.gather(first, high)

    monkeypatch.setattr(holding, "HELD_MAX", 2)
    virtual_time.run(main())


def test_however_many_the_line_is_too_short_for_so_many_a_second_ask_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> list[float]:
        line = Holding(Room().decide)
        first = asyncio.create_task(line.wait(ask("first", 100, waited_s=1.0), 5.0, 9.0))
        await asyncio.sleep(0)
        turns = [await line.wait(ask(str(number), 100), 5.0, 9.0) for number in range(6_000)]
        line.release()
        await first
        assert all(isinstance(turn, float) for turn in turns)
        return [turn for turn in turns if isinstance(turn, float)]

    monkeypatch.setattr(holding, "HELD_MAX", 1)
    turns = virtual_time.run(main())
    assert turns[0] == pytest.approx(CROWD_ASK_AGAIN_S + 1 / CROWD_ASKS_PER_S)
    assert turns == sorted(turns)
    assert sum(turn < 2.25 for turn in turns) == pytest.approx(2 * CROWD_ASKS_PER_S, abs=1)
    assert max(turns) == CROWD_ASK_AGAIN_S_MAX


def test_of_equal_places_the_right_one_is_left() -> None:
    line: WaitingLine[int] = WaitingLine()
    places = [line.add(number, 0, 1.0) for number in range(50)]
    for place in places[::2]:
        line.remove(place)
        line.remove(place)
    assert [place.item for place in line] == list(range(1, 50, 2))
    assert line.last().item == 49


def test_who_can_not_be_placed_at_all_any_more_is_told_why() -> None:
    async def main() -> None:
        room = Room()
        line = Holding(room.decide)
        task = asyncio.create_task(line.wait(ask("a", 100), 0.0, 9.0))
        await asyncio.sleep(0)
        room.error = Unavailable("nobody left")
        line.pump()
        with pytest.raises(Unavailable):
            await task
        assert len(line) == 0

    virtual_time.run(main())


def test_one_that_is_placed_charges_before_the_next_is_looked_at() -> None:
    async def main() -> list[Owner | None]:
        room = Room()
        line = Holding(room.decide)
        tasks = [asyncio.create_task(line.wait(ask(name, 100), 0.0, 1.0)) for name in "ab"]
        await asyncio.sleep(0)
        room.room = 150
        line.pump()
        return [getattr(decision, "owner", None) for decision in await asyncio.gather(*tasks)]

    assert virtual_time.run(main()) == [Owner("a", 1), None]


def test_it_tells_what_waits_for_each_model() -> None:
    async def main() -> None:
        line = Holding(Room().decide)
        asks = [ask("a", 30), ask("b", 50), ask("c", 90).model_copy(update={"model": "other"})]
        waits = [asyncio.ensure_future(line.wait(request, 0.0, 5.0)) for request in asks]
        await asyncio.sleep(0)
        assert line.demand("m") == HeldDemand(80, 50)
        assert line.demand("other") == HeldDemand(90, 90)
        assert line.demand("nobody's") == HeldDemand()
        line.release()
        await asyncio.gather(*waits)
        assert line.demand("m") == HeldDemand()

    virtual_time.run(main())
