"""Threads with a bounded queue."""

import asyncio
import threading

import pytest

from meshift.schemas.errors import Overloaded
from meshift.services.frontend.http.workers import WorkerThreads
from tests.unit.frontend.http.harness import HELLO, WAIT_S, MakeShell, error_of


async def test_results_and_exceptions_come_back() -> None:
    workers = WorkerThreads(threads=1, queue_max=1)
    try:
        assert await workers.run(divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await workers.run(divmod, 7, 0)
        assert await workers.run(threading.get_ident) != threading.get_ident()
    finally:
        workers.close()


async def test_what_does_not_fit_is_refused_until_there_is_room() -> None:
    workers, gate = WorkerThreads(threads=1, queue_max=2), threading.Event()
    try:
        calls = [asyncio.ensure_future(workers.run(gate.wait, WAIT_S)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await workers.run(gate.wait, WAIT_S)
        gate.set()
        assert await asyncio.gather(*calls) == [True, True]
        assert await workers.run(int) == 0
    finally:
        gate.set()
        workers.close()


async def test_a_call_whose_caller_is_gone_never_begins() -> None:
    workers, gate, ran = WorkerThreads(threads=1, queue_max=2), threading.Event(), threading.Event()
    try:
        first = asyncio.ensure_future(workers.run(gate.wait, WAIT_S))
        second = asyncio.ensure_future(workers.run(ran.set))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        gate.set()
        await first
        await workers.run(int)
        assert not ran.is_set()
    finally:
        gate.set()
        workers.close()


async def test_closed_threads_take_nothing_and_keep_no_place() -> None:
    workers = WorkerThreads(threads=1, queue_max=1)
    workers.close()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            await workers.run(int)


async def test_too_many_long_prompts_are_refused(make: MakeShell) -> None:
    shell, gate = make(inline_chars_max=0, tokenizer_threads=1, tokenizer_queue_max=1), threading.Event()
    blocked = asyncio.ensure_future(shell.app.state.completions._threads.run(gate.wait, WAIT_S))
    await asyncio.sleep(0)
    try:
        response = await shell.post(HELLO)
        assert response.status_code == 429
        assert error_of(response)["message"] == "too many long prompts wait to be tokenized"
    finally:
        gate.set()
        await blocked
    assert (await shell.post(HELLO)).status_code == 200
