"""Waiting for room: in order, and nothing is lost when a waiter leaves."""

import asyncio

import pytest

from meshift.kv_memory.transport.limits import ByteBudget, Pacer, TransportLimits
from tests.unit.kv_memory.virtual_time import run_virtual


async def start(budget: ByteBudget, *sizes: int) -> list["asyncio.Task[None]"]:
    tasks = [asyncio.ensure_future(budget.take(size)) for size in sizes]
    await asyncio.sleep(0)
    return tasks


async def done(*tasks: "asyncio.Task[None]") -> list[bool]:
    await asyncio.sleep(0)
    return [task.done() for task in tasks]


async def test_budget_serves_in_order() -> None:
    budget = ByteBudget(10)
    await budget.take(6)
    tasks = await start(budget, 6, 1)
    assert await done(*tasks) == [False, False], "a small one doesn't overtake"
    budget.give_back(6)
    assert await done(*tasks) == [True, True]


async def test_more_than_the_budget_passes_alone() -> None:
    budget = ByteBudget(10)
    await budget.take(1)
    tasks = await start(budget, 50, 1)
    assert await done(*tasks) == [False, False]
    budget.give_back(1)
    assert await done(*tasks) == [True, False]
    budget.give_back(50)
    assert await done(*tasks) == [True, True]


async def test_a_waiter_that_leaves_is_skipped() -> None:
    budget = ByteBudget(10)
    await budget.take(10)
    tasks = await start(budget, 10, 2)
    tasks[0].cancel()
    await done(*tasks)
    budget.give_back(10)
    assert await done(*tasks) == [True, True]
    assert tasks[0].cancelled()


async def test_room_that_comes_while_a_waiter_leaves() -> None:
    budget = ByteBudget(10)
    await budget.take(10)
    tasks = await start(budget, 10, 2)
    tasks[0].cancel()
    budget.give_back(10)
    assert await done(*tasks) == [True, True]
    assert (tasks[0].cancelled(), tasks[1].cancelled()) == (True, False)
    budget.give_back(2)
    await asyncio.wait_for(budget.take(10), 10.0)


async def test_a_waiter_that_leaves_with_its_room_gives_it_back() -> None:
    budget = ByteBudget(10)
    await budget.take(10)
    tasks = await start(budget, 10, 10)
    budget.give_back(10)
    tasks[0].cancel()
    await done(*tasks)
    assert await done(*tasks) == [True, True]
    assert not tasks[1].cancelled()


def test_pacer_keeps_the_rate() -> None:
    async def main() -> float:
        pacer = Pacer(1e6)
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        await asyncio.gather(*(pacer.take(50_000) for _ in range(20)), pacer.take(0))
        return loop.time() - start_s

    # All but the burst.
    assert run_virtual(main()) == pytest.approx(1.0 - Pacer.BURST_S)


def test_pacer_saves_up_no_more_than_a_burst() -> None:
    async def main() -> float:
        pacer = Pacer(1e6)
        loop = asyncio.get_running_loop()
        await pacer.take(1)
        await asyncio.sleep(100)
        start_s = loop.time()
        await pacer.take(1_000_000)
        return loop.time() - start_s

    assert run_virtual(main()) == pytest.approx(1.0 - Pacer.BURST_S)


def test_chunks_are_short_and_bounded() -> None:
    assert Pacer(None).chunk_bytes is None
    assert Pacer(1.0).chunk_bytes == Pacer.CHUNK_BYTES_MIN
    assert Pacer(50e6).chunk_bytes == 500_000
    assert Pacer(1e12).chunk_bytes == Pacer.CHUNK_BYTES_MAX


@pytest.mark.parametrize("limits", [{"bytes_per_s": 0.0}, {"receive_bytes_max": 10}])
def test_limits_that_make_no_sense(limits: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"rate|room"):
        TransportLimits(**limits)  # type: ignore[arg-type]
