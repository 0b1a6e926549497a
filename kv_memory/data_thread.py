"""A thread beside an engine's step thread that sends and receives KV, so that a step pays for its gather alone.

    step thread                                 data thread
    gather rows into a staging buffer
    post(address, patch, ...)      ----->       checksum, send, await the answer
                                   <-----       on_done(None or the error): release the buffer
    open_transfer(id, handler)                  handler(patch): scatter into reserved slots
    quiesce(id, on_quiet)          ----->       no handler and no send of it runs any more: on_quiet()

No call waits for the network or for the data thread's work, `start` and `close` excepted. System calls and
checksums of large buffers release the interpreter lock; patches of megabytes keep the rest, which is Python,
rare. Callbacks and handlers run on the data thread and should be short: while one runs, no byte moves."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from meshift.kv_memory.checksum import crc32
from meshift.kv_memory.transport.base import Address, Patch, PatchHandler, Transport, TransportError

CHECKSUM_LATER = -1
"""As a patch's checksum: the data thread computes it."""

POSTS_MAX = 4096
"""Patches that are posted and not done, unless said otherwise."""

OnDone = Callable[[TransportError | None], None]
OnQuiet = Callable[[], None]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Post:
    address: Address
    patch: Patch
    deadline_s: float
    on_done: OnDone


@dataclass(frozen=True, slots=True, eq=False)
class _Quiesce:
    transfer_id: str
    on_quiet: OnQuiet


class DataThread:
    """Owns a thread, its event loop, and a transport on it. All methods may be called from any thread."""

    def __init__(
        self, make_transport: Callable[[], Transport], *, name: str = "kv-data", posts_max: int = POSTS_MAX
    ) -> None:
        """`make_transport` is called on the data thread."""
        self._make_transport = make_transport
        self._posts_max = posts_max
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        # Under the lock: what the step thread has left for the data thread, and whether it may.
        self._inbox: deque[_Post | _Quiesce] = deque()
        self._accepting = False
        self._closing = False
        self._ended = False
        self._posts = 0
        # Set once before `_ready`.
        self._loop: asyncio.AbstractEventLoop
        self._transport: Transport
        self._stop: asyncio.Event
        # Of the data thread alone.
        self._sends: dict[asyncio.Task[None], _Post] = {}
        self._quiescing: set[asyncio.Task[None]] = set()

    # ---- any thread ----

    def start(self, *, timeout_s: float) -> None:
        """Returns when the transport listens. Raises TransportError if it can't, or not in time."""
        self._thread.start()
        if not self._ready.wait(timeout_s):
            raise TransportError(f"the data thread didn't start within {timeout_s} s")
        if self._failure is not None:
            raise TransportError(f"the data thread can't start: {self._failure}") from self._failure

    @property
    def running(self) -> bool:
        """Whether posts are taken."""
        return self._accepting

    @property
    def posts(self) -> int:
        """Patches that were posted and are not done."""
        return self._posts

    def open_transfer(self, transfer_id: str, handler: PatchHandler) -> Address:
        """Receive patches of this transfer at the returned address; `handler` as for a transport, on the data
        thread. Returns at once. Raises TransportError if not running, ValueError if it is open already."""
        if not self._accepting:
            raise TransportError("the data thread isn't running")
        return self._transport.open_transfer(transfer_id, handler)

    def post(self, address: Address, patch: Patch, timeout_s: float, on_done: OnDone) -> None:
        """Send a patch; returns at once. Its payload must stay as it is until `on_done(error)` is called, once,
        with None when the receiver has applied it. Patches of one transfer are applied in the order of the
        calls; after an error, all later ones of that transfer fail too.

        Raises TransportError if not running or if too many are posted; `on_done` isn't called then."""
        with self._lock:
            if not self._accepting:
                raise TransportError("the data thread isn't running")
            if self._posts >= self._posts_max:
                raise TransportError(f"{self._posts_max} patches are posted already")
            self._posts += 1
            self._leave(_Post(address, patch, self._loop.time() + timeout_s, on_done))

    def quiesce(self, transfer_id: str, on_quiet: OnQuiet) -> None:
        """The first phase of an abort. From now on patches of this transfer are refused, and posts of it fail;
        `on_quiet()` is called, once, when no handler and no send of it runs any more and every `on_done` was
        called: its slots and buffers are free for anything. A transfer that isn't known is quiet. Posts that
        come after are none of its business.

        If the data thread has ended or not begun, `on_quiet` is called before this returns."""
        with self._lock:
            idle = self._ended or self._thread.ident is None
            if not idle:
                if self._accepting:
                    self._transport.close_transfer(transfer_id)
                self._leave(_Quiesce(transfer_id, on_quiet))
        if idle:
            on_quiet()

    def close(self, *, timeout_s: float) -> bool:
        """End it: posts fail, transfers close. Whether the thread has ended in time; if not, a handler or
        callback hangs, and memory that it uses must not be used again. Idempotent. Not from the data thread."""
        with self._lock:
            self._closing = True
            if self._accepting:
                self._accepting = False
                self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _leave(self, entry: _Post | _Quiesce) -> None:
        """For the data thread; under the lock. It is woken once for all that it finds."""
        if self._accepting and not self._inbox:
            self._loop.call_soon_threadsafe(self._take_inbox)
        self._inbox.append(entry)

    # ---- the data thread ----

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            self._failure = error
            if self._ready.is_set():
                _log.exception("the data thread failed")
        finally:
            self._end()
            self._ready.set()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._transport = self._make_transport()
        await self._transport.start()
        try:
            if self._accept():
                await self._stop.wait()
        finally:
            self._take_inbox()
            for task in self._sends:
                task.cancel()
            await asyncio.gather(*self._sends, return_exceptions=True)
            await self._transport.close()
            await asyncio.gather(*self._quiescing, return_exceptions=True)

    def _accept(self) -> bool:
        """Take posts from now on, unless `close` was quicker."""
        with self._lock:
            self._accepting = not self._closing
        self._take_inbox()
        self._ready.set()
        return self._accepting

    def _end(self) -> None:
        """Nothing runs any more: whoever waits must hear of it."""
        with self._lock:
            self._accepting = False
            self._ended = True
            left, self._inbox = list(self._inbox), deque()
        closed = TransportError("the data thread has ended")
        for entry in [*self._sends.values(), *left]:
            if isinstance(entry, _Post):
                self._finish(entry, closed)
            else:
                _call(entry.on_quiet)
        self._sends.clear()

    def _take_inbox(self) -> None:
        while True:
            with self._lock:
                if not self._inbox:
                    return
                entry = self._inbox.popleft()
            if isinstance(entry, _Post):
                task = self._loop.create_task(self._send(entry))
                self._sends[task] = entry
                task.add_done_callback(self._sent)
            else:
                quiescing = self._loop.create_task(self._quiet(entry))
                self._quiescing.add(quiescing)
                quiescing.add_done_callback(self._quiescing.discard)

    async def _send(self, post: _Post) -> None:
        patch = post.patch
        if patch.checksum == CHECKSUM_LATER:
            # Before anything is awaited: tasks of one transfer start in order and must reach `send` in order.
            patch = replace(patch, checksum=crc32(patch.payload))
        await self._transport.send(post.address, patch, timeout_s=post.deadline_s - self._loop.time())

    def _sent(self, task: asyncio.Task[None]) -> None:
        post = self._sends.pop(task)
        if task.cancelled():
            self._finish(post, TransportError(f"transfer {post.patch.transfer_id} was given up"))
            return
        error = task.exception()
        if error is not None and not isinstance(error, TransportError):
            _log.error("a send failed", exc_info=error)
            error = TransportError(f"{type(error).__name__}: {error}")
        self._finish(post, error)

    def _finish(self, post: _Post, error: TransportError | None) -> None:
        with self._lock:
            self._posts -= 1
        _call(lambda: post.on_done(error))

    async def _quiet(self, entry: _Quiesce) -> None:
        # Handlers run on this thread, one at a time: now none does, and none will.
        mine = [task for task, post in self._sends.items() if post.patch.transfer_id == entry.transfer_id]
        for task in mine:
            task.cancel()
        if mine:
            # Its callbacks come after `_sent`, which was there first.
            await asyncio.wait(mine)
        _call(entry.on_quiet)


def _call(callback: Callable[[], None]) -> None:
    try:
        callback()
    except Exception:
        _log.exception("a callback of the data thread failed")
