"""The tests' own loop: real sockets, skipped waits, and a clock that nobody can hold up."""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from tests.support.socket_loop import TURN_S, SocketLoop

ResultT = TypeVar("ResultT")


def run(scenario: Coroutine[Any, Any, ResultT]) -> ResultT:
    with asyncio.Runner(loop_factory=SocketLoop) as runner:
        return runner.run(scenario)


def test_timers_come_in_order_and_take_no_time() -> None:
    rung: list[tuple[str, float]] = []

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        for name, delay_s in (("second", 0.019), ("last", 3600.0), ("first", 0.01)):
            loop.call_later(delay_s, lambda name=name: rung.append((name, loop.time())))
        await asyncio.sleep(3600.1)

    begun_s = time.monotonic()
    run(scenario())
    assert [name for name, _ in rung] == ["first", "second", "last"]
    assert rung[0][1] < 0.011
    assert 3600.0 <= rung[2][1] < 3600.1
    assert time.monotonic() - begun_s < 60.0


def test_what_holds_the_process_up_does_not_count() -> None:
    async def scenario() -> float:
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        time.sleep(0.05)  # noqa: ASYNC251 - as if the machine ran others
        for _ in range(10):
            await asyncio.sleep(0)
        return loop.time() - begun_s

    assert run(scenario()) < 12 * TURN_S


def test_who_polls_comes_to_an_end() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < 100 * TURN_S:
            await asyncio.sleep(0)

    run(scenario())


def test_what_a_socket_brings_comes_before_a_deadline() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(1_000_000))
        await writer.drain()
        writer.close()

    async def scenario() -> int:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        async with asyncio.timeout(1.0):
            writer.write(bytes(1_000_000))
            received = len(await reader.read(-1))
        writer.close()
        server.close()
        return received

    assert run(scenario()) == 1_000_000
