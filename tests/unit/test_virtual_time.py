"""The virtual event loop."""

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from meshift.services.simulation.virtual_time import (
    CANCELLED_TIMERS_MIN,
    Deadlock,
    Livelock,
    RealWorldRefused,
    VirtualTimeLoop,
    run,
)


def running() -> VirtualTimeLoop:
    """The loop that a test runs on."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    return loop


def test_hours_pass_at_once_and_exactly() -> None:
    async def main() -> float:
        await asyncio.sleep(3600)
        async with asyncio.timeout(10):
            await asyncio.sleep(2.5)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 5)
        return asyncio.get_running_loop().time()

    assert run(main()) == 3607.5


def test_whole_nanoseconds_stay_whole() -> None:
    async def main() -> list[int]:
        loop = running()
        seen: list[int] = []
        # At this time a float of seconds still has nanoseconds to spare, but not many.
        start_ns = 10**15
        for offset_ns in (3, 1, 2, 1):
            loop.call_at_ns(start_ns + offset_ns, lambda: seen.append(loop.time_ns() - start_ns))
        await asyncio.sleep(2 * 10**6)
        return seen

    assert run(main()) == [1, 1, 2, 3]


def test_timers_of_one_instant_run_in_the_order_in_which_they_were_set() -> None:
    async def main() -> list[int]:
        order: list[int] = []
        for number in range(300):
            running().call_later(1, order.append, number)
        await asyncio.sleep(1)
        await asyncio.sleep(0)
        return order

    assert run(main()) == list(range(300))


def test_a_timer_in_the_past_is_due_now() -> None:
    async def main() -> list[float]:
        loop = running()
        seen: list[float] = []
        await asyncio.sleep(1)
        loop.call_at(0.5, lambda: seen.append(loop.time()))
        loop.call_later(-3, lambda: seen.append(loop.time()))
        loop.call_at_ns(7, lambda: seen.append(loop.time()))
        await asyncio.sleep(1)
        return seen

    assert run(main()) == [1.0, 1.0, 1.0]


def test_ready_callbacks_come_before_timers() -> None:
    async def main() -> list[str]:
        order: list[str] = []
        loop = running()
        loop.call_later(0, order.append, "timer")
        loop.call_soon(loop.call_soon, order.append, "second")
        loop.call_soon(order.append, "first")
        await asyncio.sleep(1)
        return order

    assert run(main()) == ["first", "second", "timer"]


def test_cancelled_timers_don_t_run_and_don_t_stay() -> None:
    async def main() -> list[int]:
        loop = running()
        order: list[int] = []
        for number in range(20 * CANCELLED_TIMERS_MIN):
            handle = loop.call_later(100 + number % 7, order.append, number)
            if number % 50:
                handle.cancel()
                handle.cancel()
            assert len(loop._timers) < 4 * CANCELLED_TIMERS_MIN
        await asyncio.sleep(200)
        return order

    order = run(main())
    assert sorted(order) == list(range(0, 20 * CANCELLED_TIMERS_MIN, 50))
    assert order == sorted(order, key=lambda number: (number % 7, number))


def test_a_timer_may_cancel_another_of_its_instant() -> None:
    async def main() -> list[str]:
        loop = running()
        seen: list[str] = []
        handles: list[asyncio.TimerHandle] = []

        def cancel_second() -> None:
            handles[0].cancel()

        loop.call_at(1, cancel_second)
        handles.append(loop.call_at(1, seen.append, "second"))
        loop.call_at(1, seen.append, "third")
        await asyncio.sleep(2)
        return seen

    assert run(main()) == ["third"]


def test_the_course_is_the_same_each_time() -> None:
    async def main() -> list[tuple[float, int]]:
        log: list[tuple[float, int]] = []
        queue: asyncio.Queue[int] = asyncio.Queue(3)

        async def produce(number: int) -> None:
            for step in range(20):
                await asyncio.sleep((number * 7 + step * 3) % 5 / 10)
                await queue.put(number)

        async def consume() -> None:
            while True:
                number = await queue.get()
                log.append((running().time(), number))
                await asyncio.sleep(0.05)

        consumers = [asyncio.ensure_future(consume()) for _ in range(2)]
        await asyncio.gather(*(produce(number) for number in range(8)))
        await asyncio.sleep(1)
        for task in consumers:
            task.cancel()
        await asyncio.gather(*consumers, return_exceptions=True)
        return log

    first = run(main())
    assert len(first) == 160
    assert run(main()) == first


def test_waiting_for_nothing_is_a_deadlock() -> None:
    async def wait_for_ever() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.sleep(2)
        await asyncio.create_task(wait_for_ever(), name="the one that waits")

    with pytest.raises(Deadlock, match=r"at 2\.0 s.*the one that waits"):
        run(main())


def test_a_deadlock_names_a_few_of_many_tasks() -> None:
    async def main() -> None:
        await asyncio.gather(*(asyncio.Event().wait() for _ in range(50)))

    with pytest.raises(Deadlock, match=r"51 tasks wait: .*, \.\.\.$"):
        run(main())


def test_cancelled_timers_alone_are_a_deadlock() -> None:
    async def main() -> None:
        running().call_later(5, print).cancel()
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run(main())


def test_a_loop_that_was_asked_to_stop_stops() -> None:
    loop = VirtualTimeLoop()
    loop.call_later(3, loop.stop)
    loop.run_forever()
    assert loop.time() == 3.0
    loop.stop()
    loop.run_forever()
    loop.close()


def test_turning_on_the_spot_is_a_livelock() -> None:
    async def main() -> None:
        await asyncio.sleep(1)
        while True:
            await asyncio.sleep(0)

    with pytest.raises(Livelock, match=r"at 1\.0 s"):
        run(main(), callbacks_per_instant_max=1_000)


def test_after_a_livelock_tasks_can_still_end() -> None:
    ended: list[str] = []

    async def main() -> None:
        loop = running()

        def again() -> None:
            loop.call_soon(again)

        again()
        try:
            await asyncio.sleep(1)
        finally:
            ended.append("main")

    with pytest.raises(Livelock):
        run(main(), callbacks_per_instant_max=1_000)
    assert ended == ["main"]


def test_timers_that_don_t_move_the_clock_are_a_livelock() -> None:
    async def main() -> None:
        loop = running()

        def again() -> None:
            loop.call_at_ns(loop.time_ns(), again)

        again()
        await asyncio.sleep(1)

    with pytest.raises(Livelock):
        run(main(), callbacks_per_instant_max=1_000)


def test_much_work_over_time_is_no_livelock() -> None:
    async def main() -> None:
        for _ in range(2_000):
            await asyncio.sleep(0.001)

    run(main(), callbacks_per_instant_max=100)


async def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    await function(*args, **kwargs)


@pytest.mark.parametrize(
    "attempt",
    [
        lambda loop: _call(asyncio.to_thread, print),
        lambda loop: _call(loop.run_in_executor, None, print),
        lambda loop: _call(asyncio.open_connection, "127.0.0.1", 1),
        lambda loop: _call(asyncio.start_server, print, "127.0.0.1", 0),
        lambda loop: _call(asyncio.open_unix_connection, "/nowhere"),
        lambda loop: _call(loop.create_datagram_endpoint, asyncio.DatagramProtocol),
        lambda loop: _call(loop.getaddrinfo, "localhost", 1),
        lambda loop: _call(asyncio.create_subprocess_exec, "true"),
        lambda loop: _call(asyncio.create_subprocess_shell, "true"),
        lambda loop: _call(loop.sock_recv, None, 1),
        lambda loop: _call(loop.add_signal_handler, 2, print),
        lambda loop: _call(loop.add_reader, 0, print),
        lambda loop: _call(loop.set_default_executor, None),
    ],
)  # fmt: skip
def test_the_real_world_is_refused(attempt: Callable[[VirtualTimeLoop], Any]) -> None:
    async def main() -> None:
        with pytest.raises(RealWorldRefused, match="real world"):
            await attempt(running())

    run(main())


def test_another_thread_is_refused_and_one_s_own_is_not() -> None:
    async def main() -> tuple[list[str], list[type[Exception]]]:
        loop = running()
        seen: list[str] = []
        errors: list[type[Exception]] = []

        def intrude() -> None:
            try:
                loop.call_soon_threadsafe(seen.append, "other")
            except RealWorldRefused as error:
                errors.append(type(error))

        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()
        loop.call_soon_threadsafe(seen.append, "own")
        await asyncio.sleep(1)
        return seen, errors

    assert run(main()) == (["own"], [RealWorldRefused])


def test_an_error_in_a_callback_fails_the_run(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)

    async def main() -> None:
        running().call_later(1, lambda: 1 // 0)
        await asyncio.sleep(2)

    with pytest.raises(ExceptionGroup) as caught:
        run(main())
    assert caught.group_contains(ZeroDivisionError)


def test_what_main_raises_comes_out() -> None:
    async def main() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        run(main())


def test_tasks_left_behind_are_cancelled() -> None:
    ended: list[str] = []

    async def stay() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            ended.append("cancelled")

    async def main() -> str:
        asyncio.get_running_loop().create_task(stay())
        await asyncio.sleep(1)
        return "done"

    assert run(main()) == "done"
    assert ended == ["cancelled"]


def test_a_closed_loop_takes_no_timers() -> None:
    loop = VirtualTimeLoop()
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_later(1, print)


def test_generators_are_closed_at_the_end() -> None:
    closed: list[bool] = []

    async def numbers() -> Any:
        try:
            while True:
                yield 1
        finally:
            closed.append(True)

    async def main() -> None:
        generator = numbers()
        await anext(generator)
        globals()["_kept"] = generator

    run(main())
    assert closed == [True]
    del globals()["_kept"]
