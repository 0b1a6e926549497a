"""Compilations that take too long. Nothing can stop one: its thread is given up, and another takes the next."""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

ABANDONED_MAX: Final = 3
"""Threads given up at once, each of which keeps a core busy. Beyond that, new schemas wait until one ends."""

Key = tuple[str, str]


class CompilerThreads:
    """What an executor's threads are compiling, and since when. Used by those threads and by the scheduler's."""

    def __init__(self, executor: ThreadPoolExecutor, compile_s_max: float, clock: Callable[[], float]) -> None:
        self._executor = executor
        self._compile_s_max = compile_s_max
        self._clock = clock
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._running: dict[int, tuple[Key, float]] = {}
        """What, since when; by number, since requests that come together may bring the same schema."""
        self._abandoned: set[int] = set()

    @contextlib.contextmanager
    def compiling(self, key: Key) -> Iterator[None]:
        """Around a compilation, on its thread."""
        with self._lock:
            number = next(self._numbers)
            self._running[number] = key, self._clock()
        try:
            yield
        finally:
            with self._lock:
                del self._running[number]
                if number in self._abandoned:
                    self._abandoned.remove(number)
                    self._executor._max_workers -= 1

    def overdue(self) -> set[Key]:
        """Those that have taken too long and still go on; each is given up when it is first seen here."""
        with self._lock:
            limit_s = self._clock() - self._compile_s_max
            found = {number for number, (_, began_s) in self._running.items() if began_s < limit_s}
            for number in sorted(found - self._abandoned)[: ABANDONED_MAX - len(self._abandoned)]:
                self._abandoned.add(number)
                # The pool has no name for "one more thread"; it would only ever start one at the next submission.
                self._executor._max_workers += 1
                self._executor._adjust_thread_count()
            return {self._running[number][0] for number in found}
