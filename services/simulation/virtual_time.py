"""An event loop whose clock jumps to the next timer: hours of mesh time pass in seconds, always in the same order.

The clock is an integer of nanoseconds. Ready callbacks run first in, first out; when none is left, the clock moves to
the earliest timer, and timers of one instant run in the order in which they were set. So a program that uses nothing
but the loop (and seeded random generators) takes the same course each time.

What would let the real world in (threads, executors, sockets, processes, signals) raises `RealWorldRefused`.

An engine or a bus that wants whole nanoseconds uses `loop.time_ns()` and `loop.call_at_ns()` if the loop has them.
"""

import asyncio
import heapq
import threading
from asyncio import base_events, events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from typing import Any, NoReturn, TypeVar, TypeVarTuple

ResultT = TypeVar("ResultT")
ArgumentTs = TypeVarTuple("ArgumentTs")

NANOSECONDS = 1_000_000_000

CALLBACKS_PER_INSTANT_MAX = 1_000_000
"""More callbacks than this without the clock moving are a livelock."""

CANCELLED_TIMERS_MIN = 512
"""Fewer cancelled timers than this are not worth a compaction."""

TASKS_NAMED_MAX = 20
"""How many waiting tasks the message of a deadlock names."""


class Deadlock(RuntimeError):
    """Nothing is ready, no timer is set, and nobody asked the loop to stop: it would wait for ever."""


class Livelock(RuntimeError):
    """Callbacks go on without the clock moving."""


class RealWorldRefused(RuntimeError):
    """The program wants something that virtual time can't give: a thread, a socket, a process, a signal."""


class _Timer(events.TimerHandle):
    """Set for every message and every step. So the attributes are set here, all at once: what the constructors of the
    base classes do beside that is for asyncio's debug mode."""

    __slots__ = ()

    def __init__(
        self,
        when_s: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: asyncio.AbstractEventLoop,
        context: Context | None,
    ) -> None:
        self._callback = callback
        self._args = args
        self._loop = loop
        self._context = copy_context() if context is None else context
        self._cancelled = False
        self._repr = None
        self._source_traceback = None
        self._when = when_s
        self._scheduled = True


class VirtualTimeLoop(base_events.BaseEventLoop):
    """The loop. `run` below is the usual way to use it.

    Raises out of `run_forever` and `run_until_complete`: `Deadlock`, `Livelock`.
    """

    # These are the base class's; its type stubs leave them out.
    _closed: bool
    _ready: deque[events.Handle]
    _stopping: bool
    _thread_id: int | None

    def __init__(self, *, callbacks_per_instant_max: int = CALLBACKS_PER_INSTANT_MAX) -> None:
        super().__init__()
        self._now_ns = 0
        self._sequence = 0
        self._timers: list[tuple[int, int, events.TimerHandle]] = []
        self._timers_cancelled = 0
        self._callbacks_at_instant = 0
        self._callbacks_per_instant_max = callbacks_per_instant_max

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now_ns / NANOSECONDS

    def time_ns(self) -> int:
        """Virtual nanoseconds since the loop was made; exact."""
        return self._now_ns

    def call_at_ns(
        self,
        when_ns: int,
        callback: Callable[[*ArgumentTs], object],
        *args: *ArgumentTs,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Call at `when_ns`, or at the present instant if that is past."""
        return self._set_timer(when_ns, callback, args, context)

    def call_at(
        self, when: float, callback: Callable[[*ArgumentTs], object], *args: *ArgumentTs, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Call at `when` seconds."""
        return self._set_timer(round(when * NANOSECONDS), callback, args, context)

    def call_later(
        self,
        delay: float,
        callback: Callable[[*ArgumentTs], object],
        *args: *ArgumentTs,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Call in `delay` seconds."""
        return self._set_timer(self._now_ns + round(delay * NANOSECONDS), callback, args, context)

    def _set_timer(
        self, when_ns: int, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None
    ) -> asyncio.TimerHandle:
        if self._closed:
            raise RuntimeError("virtual time: the loop is closed")
        if when_ns < self._now_ns:
            when_ns = self._now_ns
        handle = _Timer(when_ns / NANOSECONDS, callback, args, self, context)
        self._sequence += 1
        heapq.heappush(self._timers, (when_ns, self._sequence, handle))
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*ArgumentTs], object], *args: *ArgumentTs, context: Context | None = None
    ) -> asyncio.Handle:
        """`call_soon`, from this loop's own thread only (asyncio's handler of Ctrl-C comes this way)."""
        if self._thread_id is not None and self._thread_id != threading.get_ident():
            raise RealWorldRefused("virtual time: another thread called call_soon_threadsafe")
        return self.call_soon(callback, *args, context=context)

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """There is no executor."""

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        # `asyncio.timeout` and request deadlines nearly always cancel their timers; left in the heap they would
        # slow each push. Rebuilding keeps the order, because (time, sequence) is total.
        self._timers_cancelled += 1
        if self._timers_cancelled >= max(CANCELLED_TIMERS_MIN, len(self._timers) // 2):
            self._timers = [entry for entry in self._timers if not entry[2].cancelled()]
            heapq.heapify(self._timers)
            self._timers_cancelled = 0

    def _run_once(self) -> None:
        if not self._ready and not self._advance():
            return
        count = len(self._ready)
        self._callbacks_at_instant += count
        if self._callbacks_at_instant > self._callbacks_per_instant_max:
            # Counted anew, so that tasks can be cancelled afterwards.
            self._callbacks_at_instant = 0
            limit = self._callbacks_per_instant_max
            raise Livelock(f"virtual time: over {limit} callbacks at {self.time()} s and no end; {self._waiting()}")
        popleft = self._ready.popleft
        for _ in range(count):
            handle = popleft()
            if not handle._cancelled:
                handle._run()

    def _advance(self) -> bool:
        """Move the clock to the next timer, and that instant's timers to the ready queue."""
        self._drop_cancelled_head()
        if not self._timers:
            if self._stopping:
                return False
            raise Deadlock(f"virtual time: nothing to run and no timer at {self.time()} s; {self._waiting()}")
        now_ns = self._timers[0][0]
        if now_ns != self._now_ns:
            self._now_ns = now_ns
            self._callbacks_at_instant = 0
        timers, ready = self._timers, self._ready
        while timers and timers[0][0] == now_ns:
            handle = heapq.heappop(timers)[2]
            handle._scheduled = False  # type: ignore[attr-defined]
            if handle._cancelled:
                self._timers_cancelled -= 1
            else:
                ready.append(handle)
        return True

    def _drop_cancelled_head(self) -> None:
        while self._timers and self._timers[0][2]._cancelled:
            heapq.heappop(self._timers)[2]._scheduled = False  # type: ignore[attr-defined]
            self._timers_cancelled -= 1

    def _waiting(self) -> str:
        # For the message only; sorted, because the set of all tasks has no fixed order.
        names = sorted(task.get_name() for task in asyncio.all_tasks(self))
        shown = ", ".join(names[:TASKS_NAMED_MAX])
        return f"{len(names)} tasks wait: {shown}" + (", ..." if len(names) > TASKS_NAMED_MAX else "")


_REFUSED = (
    "run_in_executor", "set_default_executor",
    "add_reader", "remove_reader", "add_writer", "remove_writer",
    "add_signal_handler", "remove_signal_handler",
    "getaddrinfo", "getnameinfo",
    "create_connection", "create_server", "create_datagram_endpoint", "connect_accepted_socket", "start_tls",
    "create_unix_connection", "create_unix_server", "sendfile",
    "sock_accept", "sock_connect", "sock_recv", "sock_recv_into", "sock_recvfrom", "sock_recvfrom_into",
    "sock_sendall", "sock_sendto", "sock_sendfile",
    "connect_read_pipe", "connect_write_pipe", "subprocess_exec", "subprocess_shell",
)  # fmt: skip


def _refuse(name: str) -> Callable[..., NoReturn]:
    def refused(self: VirtualTimeLoop, *args: object, **kwargs: object) -> NoReturn:
        raise RealWorldRefused(f"virtual time: loop.{name} would let the real world in")

    return refused


for _name in _REFUSED:
    setattr(VirtualTimeLoop, _name, _refuse(_name))


def run(main: Coroutine[Any, Any, ResultT], *, callbacks_per_instant_max: int = CALLBACKS_PER_INSTANT_MAX) -> ResultT:
    """Run `main` on a new loop, starting at 0 s, and return its result.

    An exception that escaped from a callback fails the run when `main` has ended (a real loop would log it and go
    on), as an `ExceptionGroup`. Tasks that `main` left behind are cancelled in no fixed order, so let it end its own.
    """
    errors: list[Exception] = []

    def on_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)
        error = context.get("exception")
        if "handle" in context and isinstance(error, Exception):
            errors.append(error)

    def make_loop() -> VirtualTimeLoop:
        loop = VirtualTimeLoop(callbacks_per_instant_max=callbacks_per_instant_max)
        loop.set_exception_handler(on_error)
        return loop

    with asyncio.Runner(loop_factory=make_loop) as runner:
        result = runner.run(main)
    if errors:
        raise ExceptionGroup("virtual time: callbacks raised", errors)
    return result
