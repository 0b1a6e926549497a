"""A rank's access to the library: its claim, its gate, the thread that goes inside, and the groups that are open."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from meshift.kv_memory.transport.base import TransportError
from meshift.kv_memory.transport.distributed.claims import Claims
from meshift.kv_memory.transport.distributed.gate import Gate
from meshift.kv_memory.transport.distributed.library import Group, Library, MakeLibrary, Meeting, Say
from meshift.kv_memory.transport.outgoing import reason_of

GROUPS_MAX = 64
"""Open at an end; the one unused for longest is dropped."""

MIB = 1 << 20

OnEnd = Callable[[str | None], None]
"""Told why an operation failed, or None."""


@dataclass(frozen=True, slots=True)
class HandshakeLimits:
    """What inference may be held up by, besides `TransportLimits`."""

    piece_bytes: int = 4 * MIB
    """Inference passes between two pieces."""
    answer_timeout_s: float = 1.0
    """Of a sender whose gate is locked, for the receiver's ENTERED or BUSY; the receiver waits for nothing then."""
    crossing_timeout_s: float = 2.0
    """For one piece in the library, the opening of a group included. The longest that a gate stays locked is this and
    the time above."""

    def __post_init__(self) -> None:
        if self.piece_bytes <= 0:
            raise ValueError(f"pieces of {self.piece_bytes} bytes")


@dataclass(slots=True)
class Slot:
    """A group with one peer, in one direction."""

    key: str
    """Unique; each opening has its own, which the receiver gives."""
    group: Group | None = None
    """Opened by its first operation."""


class Groups:
    """Those of one end, by (peer, whether this end sends). The loop's, but for what is in a slot."""

    def __init__(self, close: Callable[[Group], None]) -> None:
        self._close = close
        self._slots: OrderedDict[tuple[str, bool], Slot] = OrderedDict()

    def key_of(self, peer: str, sends: bool) -> str:
        """The open group's; empty if there is none."""
        slot = self._slots.get((peer, sends))
        return slot.key if slot is not None and slot.group is not None else ""

    def use(self, peer: str, sends: bool, key: str) -> Slot:
        """The slot of that group, which replaces any other."""
        slot = self._slots.get((peer, sends))
        if slot is None or slot.key != key:
            self.discard(peer, sends)
            slot = self._slots[peer, sends] = Slot(key)
        self._slots.move_to_end((peer, sends))
        if len(self._slots) > GROUPS_MAX:
            self.discard(*next(iter(self._slots)))
        return slot

    def discard(self, peer: str, sends: bool) -> None:
        """Drop it. Idempotent."""
        slot = self._slots.pop((peer, sends), None)
        if slot is not None and slot.group is not None:
            group, slot.group = slot.group, None
            self._close(group)

    def clear(self) -> None:
        """Drop all."""
        for peer, sends in list(self._slots):
            self.discard(peer, sends)


class Access:
    """Of one end. Everything is the loop's, but the jobs."""

    def __init__(self, gate: Gate, make_library: MakeLibrary) -> None:
        self.gate = gate
        self.claims = Claims()
        self.groups = Groups(self._close_group)
        self._make_library = make_library
        self._library: Library | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="meshift-library")

    @property
    def library(self) -> Library:
        """Raises TransportError if not running."""
        if self._library is None:
            raise TransportError("not running")
        return self._library

    async def start(self, host: str) -> None:
        """Make the library. Raises TransportError."""
        self._library = await asyncio.get_running_loop().run_in_executor(self._worker, self._make_library, host)

    async def close(self) -> None:
        """Drop the groups and the library, after the jobs that run."""
        self.groups.clear()
        self._library = None
        await asyncio.get_running_loop().run_in_executor(None, self._worker.shutdown)

    def run(self, job: Callable[[], None], on_end: OnEnd) -> None:
        """Have the library thread do it; then `on_end(why it failed, or None)` on the loop."""
        loop = asyncio.get_running_loop()

        def ended(failure: str | None) -> None:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(on_end, failure)

        def work() -> None:
            try:
                job()
            except BaseException as error:
                ended(reason_of(error))
            else:
                ended(None)

        self._worker.submit(work)

    def _close_group(self, group: Group) -> None:
        self._worker.submit(group.close)


class Presence:
    """What one exchange has of a rank's access."""

    def __init__(self, access: Access, say: Say) -> None:
        """`say` brings what a new group needs to the peer's `meeting`; the loop's."""
        self._access = access
        self._loop = asyncio.get_running_loop()
        self.meeting = Meeting(lambda body: self._later(say, body))
        self._wants_gate = False
        self._locked = False

    def claim(self, on_claimed: Callable[[], None]) -> None:
        """Queue for the claim."""
        self._access.claims.take(self, on_claimed)

    def unclaim(self) -> None:
        """Give it back. Idempotent."""
        self._access.claims.give_back(self)

    def try_lock(self) -> bool:
        """Lock the gate, if it is free."""
        self._locked = self._access.gate.try_lock()
        return self._locked

    def lock(self, on_locked: Callable[[], None]) -> None:
        """Lock the gate as soon as it is free."""

        def attempt() -> None:
            if self._wants_gate and self.try_lock():
                self._wants_gate = False
                on_locked()
            elif self._wants_gate:
                self._watch(attempt)

        self._wants_gate = True
        self._loop.call_soon(attempt)

    def watch(self, on_free: Callable[[], None]) -> None:
        """Be told when the gate is free."""

        def freed() -> None:
            if self._wants_gate:
                self._wants_gate = False
                on_free()

        self._wants_gate = True
        self._watch(freed)

    def unlock(self) -> None:
        """Open the gate, or don't want it any more. Idempotent."""
        if self._wants_gate:
            self._wants_gate = False
            self._access.gate.unwatch()
        if self._locked:
            self._locked = False
            self._access.gate.unlock()

    def send(self, slot: Slot, piece: memoryview, on_end: OnEnd, *, timeout_s: float) -> None:
        """Enter the library and send a piece."""
        library = self._access.library

        def job() -> None:
            if slot.group is None:
                slot.group = library.open(self.meeting, sends=True, timeout_s=timeout_s)
            slot.group.send(piece, timeout_s=timeout_s)

        self._access.run(job, on_end)

    def receive(
        self, slot: Slot, piece: memoryview, on_entered: Callable[[], None], on_end: OnEnd, *, timeout_s: float
    ) -> None:
        """Enter the library and receive a piece; `on_entered` when the sender may come."""
        library = self._access.library

        def job() -> None:
            if self.meeting.cancelled:
                raise TransportError("cancelled")
            if slot.group is None:
                # To open a group is an operation of both: the sender must come for it.
                self._later(on_entered)
                slot.group = library.open(self.meeting, sends=False, timeout_s=timeout_s)
                slot.group.receive(piece, lambda: None, timeout_s=timeout_s)
            else:
                slot.group.receive(piece, lambda: self._later(on_entered), timeout_s=timeout_s)

        self._access.run(job, on_end)

    def cancel(self) -> None:
        """An end that waits for the other to open a group with it waits no longer."""
        self.meeting.cancel()

    def _watch(self, on_free: Callable[[], None]) -> None:
        self._access.gate.watch(lambda: self._later(on_free))

    def _later(self, call: Callable[..., None], *arguments: object) -> None:
        """On the loop, from any thread; the loop may have ended."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *arguments)
