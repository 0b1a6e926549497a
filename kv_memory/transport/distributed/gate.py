"""A rank's gate: operations of inference, any number at a time, or one exchange of a move, use the library."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

INFERENCE_TIMEOUT_S = 60.0
"""That inference waits for an exchange inside at most; every exchange ends within its own deadlines long before."""


class Gate:
    """One per process and library. Thread-safe. Only `enter`, inference's, waits."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        # All under the condition.
        self._inside = 0
        self._waiting = 0
        self._locked = False
        self._watcher: Callable[[], None] | None = None

    @property
    def locked(self) -> bool:
        """Whether an exchange is inside."""
        return self._locked

    # ---- inference ----

    def enter(self, *, timeout_s: float = INFERENCE_TIMEOUT_S) -> None:
        """Before an operation of inference is given to the library; `leave` when it has completed, not when it was
        issued. Waits while an exchange is inside, and for nothing else. Raises TimeoutError."""
        with self._condition:
            self._waiting += 1
            try:
                if not self._condition.wait_for(lambda: not self._locked, timeout_s):
                    raise TimeoutError(f"an exchange has been in the gate for {timeout_s} s")
                self._inside += 1
            finally:
                self._waiting -= 1

    def leave(self) -> None:
        """An operation of inference has completed; any thread."""
        with self._condition:
            assert self._inside > 0, "nothing of inference is inside"
            self._inside -= 1
            watcher = self._take_watcher()
        if watcher is not None:
            watcher()

    @contextmanager
    def inference(self, *, timeout_s: float = INFERENCE_TIMEOUT_S) -> Iterator[None]:
        """Around an operation of inference that is waited for."""
        self.enter(timeout_s=timeout_s)
        try:
            yield
        finally:
            self.leave()

    # ---- exchanges ----

    def try_lock(self) -> bool:
        """Lock it if nothing is inside and no inference waits; whether it is locked by this call."""
        with self._condition:
            if not self._free():
                return False
            self._locked = True
            return True

    def unlock(self) -> None:
        """Let inference pass again."""
        with self._condition:
            assert self._locked, "it isn't locked"
            self._locked = False
            self._condition.notify_all()
            watcher = self._take_watcher()
        if watcher is not None:
            watcher()

    def watch(self, on_free: Callable[[], None]) -> None:
        """Have `on_free` called once, when the gate is free: within this call, or on the thread that leaves last. One
        watcher at a time, which the claims see to."""
        with self._condition:
            assert self._watcher is None, "somebody watches already"
            if not self._free():
                self._watcher = on_free
                return
        on_free()

    def unwatch(self) -> None:
        """Forget the watcher. Idempotent; a call of it that is under way isn't undone."""
        with self._condition:
            self._watcher = None

    def _free(self) -> bool:
        return not (self._locked or self._inside or self._waiting)

    def _take_watcher(self) -> Callable[[], None] | None:
        if self._watcher is None or not self._free():
            return None
        watcher, self._watcher = self._watcher, None
        return watcher
