"""One exchange at its receiver: what `table.RECEIVER` says, done."""

import asyncio
import secrets
from collections.abc import Callable

from meshift.kv_memory.transport.base import TransportError
from meshift.kv_memory.transport.distributed.access import Access, HandshakeLimits, Presence, Slot
from meshift.kv_memory.transport.distributed.link import Announcement, Kind, Link
from meshift.kv_memory.transport.distributed.table import (
    RECEIVER_FINAL,
    Effect,
    ReceiverEvent,
    ReceiverState,
    receiver_step,
)
from meshift.kv_memory.transport.end import retrieve
from meshift.kv_memory.transport.frames import REASON_BYTES_MAX

_S, _E = ReceiverState, ReceiverEvent

KEY_BYTES = 16

PATIENT = frozenset({ReceiverState.READY, ReceiverState.HELD_OFF})
"""Where it waits for a peer that does nothing and lets nobody else have the claim."""


class Receiving:
    """From its announcement to `over`."""

    def __init__(
        self,
        number: int,
        announcement: Announcement,
        link: Link,
        access: Access,
        limits: HandshakeLimits,
        stall_timeout_s: float,
    ) -> None:
        self.state = ReceiverState.START
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """When all is in the memory given to `begin`, and the library writes there no more. TransportError if it was
        aborted; then the sender has been told."""
        self.over.add_done_callback(retrieve)
        self._number = number
        self._announcement = announcement
        self._link = link
        self._access = access
        self._limits = limits
        self._stall_timeout_s = stall_timeout_s
        self._presence = Presence(access, lambda body: link.say(Kind.MEET, number, body))
        self._slot: Slot | None = None
        self._view = memoryview(b"")
        self._offset = 0
        self._reason = ""
        self._timer: asyncio.TimerHandle | None = None
        peer = announcement.location
        self._effects: dict[Effect, Callable[[], None]] = {
            Effect.CLAIM: lambda: self._presence.claim(lambda: self.handle(_E.CLAIMED)),
            Effect.UNCLAIM: self._presence.unclaim,
            Effect.UNLOCK: self._presence.unlock,
            Effect.WATCH: lambda: self._presence.watch(lambda: self.handle(_E.FREED)),
            Effect.CROSS: self._cross,
            Effect.CANCEL: self._presence.cancel,
            Effect.DISCARD: lambda: access.groups.discard(peer, False),
            Effect.SAY_READY: self._say_ready,
            Effect.SAY_ENTERED: lambda: link.say(Kind.ENTERED, number),
            Effect.SAY_BUSY: lambda: link.say(Kind.BUSY, number),
            Effect.SAY_FREE: lambda: link.say(Kind.FREE, number),
            Effect.SAY_REFUSE: self._say_refuse,
        }

    def begin(self, view: memoryview) -> None:
        """There is memory for it."""
        self._view = view
        self.handle(_E.BEGIN)

    def asked(self) -> None:
        """The sender wants to enter; the answer leaves at once. Raises IllegalTransition."""
        free = self.state is _S.READY and self._presence.try_lock()
        self.handle(_E.ENTER_FREE if free else _E.ENTER_BUSY)

    def meet(self, body: bytes) -> None:
        """The sender says what a new group needs. Raises FrameError."""
        self._presence.meeting.hear(body)

    def handle(self, event: ReceiverEvent, reason: str = "") -> None:
        """Something happened; `reason` if it may be the end. Raises IllegalTransition."""
        if self.state in RECEIVER_FINAL:
            return
        state, effects = receiver_step(self.state, event)
        self._reason = self._reason or reason
        self.state = state
        self._arm()
        for effect in effects:
            self._effects[effect]()
        if state in RECEIVER_FINAL and not self.over.done():
            self._settle()

    # ---- effects ----

    def _say_ready(self) -> None:
        announcement, groups = self._announcement, self._access.groups
        key = groups.key_of(announcement.location, False)
        if not key or key != announcement.group_key:
            key = secrets.token_hex(KEY_BYTES)
        self._slot = groups.use(announcement.location, False, key)
        self._link.say(Kind.READY, self._number, key.encode())

    def _say_refuse(self) -> None:
        self._link.say(Kind.REFUSE, self._number, self._reason.encode(errors="replace")[:REASON_BYTES_MAX])

    def _cross(self) -> None:
        assert self._slot is not None
        piece = self._view[self._offset : self._offset + self._announcement.piece_bytes]
        self._presence.receive(
            self._slot,
            piece,
            lambda: self.handle(_E.ENTERED),
            self._crossed,
            timeout_s=self._limits.crossing_timeout_s,
        )

    def _crossed(self, failure: str | None) -> None:
        if failure is not None:
            self.handle(_E.BROKEN, failure)
            return
        self._offset += self._announcement.piece_bytes
        self.handle(_E.LAST_CROSSED if self._offset >= self._view.nbytes else _E.PIECE_CROSSED)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.state in PATIENT:
            reason = "the sender makes no progress"
            self._timer = asyncio.get_running_loop().call_later(self._stall_timeout_s, self.handle, _E.GIVE_UP, reason)

    def _settle(self) -> None:
        if self.state is _S.DONE:
            self.over.set_result(None)
        else:
            self.over.set_exception(TransportError(self._reason or "withdrawn"))
