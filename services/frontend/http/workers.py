"""Threads for what would keep the event loop busy: long bodies and prompts, tokenisers that are not loaded yet."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from meshift.schemas.errors import Overloaded

P = ParamSpec("P")
T = TypeVar("T")


class WorkerThreads:
    """A thread pool with a bounded queue."""

    def __init__(self, *, threads: int, queue_max: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="tokenizer")
        self._places = threading.Semaphore(queue_max)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call it in a thread. If the caller is cancelled, a call that has not begun never does. Raises `Overloaded`
        when too many calls wait or run."""
        if not self._places.acquire(blocking=False):
            raise Overloaded("too many long prompts wait to be tokenized")
        try:
            future = self._executor.submit(function, *args, **kwargs)
        except BaseException:
            self._places.release()
            raise
        future.add_done_callback(self._leave)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Running calls end, waiting ones are cancelled."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _leave(self, _future: "Future[T]") -> None:
        self._places.release()
