"""Ending tasks: those of endpoint handlers, and those that talk to NATS."""

import asyncio
from collections.abc import Coroutine
from typing import Any

CANCEL_AGAIN_S = 2.0
"""When to cancel a task once more; long enough for what it has to clean up."""


async def end_task(task: asyncio.Task[Any]) -> None:
    """Cancel `task` until it has ended. Once may not do: nats-py and, before Python 3.12, `asyncio.wait_for` lose a
    cancellation that comes at the wrong moment. What the task raises is dropped."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=CANCEL_AGAIN_S)
    if not task.cancelled():
        task.exception()


class AnswerTasks:
    """Keeps running tasks alive, and ends them at close. In order of their start, so that simulation repeats."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[None], None] = {}

    def spawn(self, answer: Coroutine[Any, Any, None]) -> None:
        """Run `answer` as a task."""
        task = asyncio.get_running_loop().create_task(answer)
        self._tasks[task] = None
        task.add_done_callback(self._forget)

    async def finish(self, timeout_s: float) -> None:
        """Wait for the tasks, then cancel those that still run."""
        if not self._tasks:
            return
        await asyncio.wait(list(self._tasks), timeout=timeout_s)
        left = list(self._tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
