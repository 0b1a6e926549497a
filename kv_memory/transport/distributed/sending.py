"""One exchange at its sender: what `table.SENDER` says, done."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from meshift.kv_memory.transport.base import TransportError
from meshift.kv_memory.transport.distributed.access import Access, HandshakeLimits, Presence, Slot
from meshift.kv_memory.transport.distributed.link import Kind, Link
from meshift.kv_memory.transport.distributed.table import (
    SENDER_FINAL,
    Effect,
    SenderEvent,
    SenderState,
    sender_step,
)
from meshift.kv_memory.transport.end import retrieve
from meshift.kv_memory.transport.limits import Pacer

_S, _E = SenderState, SenderEvent


@dataclass(frozen=True, slots=True)
class Parcel:
    """What is to be sent, and to whom."""

    announcement: bytes
    payload: memoryview
    """Of bytes."""
    peer: str
    """The receiver's location."""


class Sending:
    """From its beginning to `over`."""

    def __init__(
        self, number: int, parcel: Parcel, link: Link, access: Access, limits: HandshakeLimits, pacer: Pacer
    ) -> None:
        self.state = SenderState.START
        self.number = number
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """When the library and the peer have no use for the payload any more. TransportError if it was aborted."""
        self.over.add_done_callback(retrieve)
        self.held_off = 0
        """How often the receiver sent it back."""
        self._parcel = parcel
        self._link = link
        self._access = access
        self._limits = limits
        self._pacer = pacer
        self._presence = Presence(access, lambda body: link.say(Kind.MEET, number, body))
        self._slot: Slot | None = None
        self._reason = ""
        self._offset = 0
        self._timer: asyncio.TimerHandle | None = None
        self._pacing: asyncio.Task[None] | None = None
        self._effects: dict[Effect, Callable[[], None]] = {
            Effect.CLAIM: lambda: self._presence.claim(lambda: self.handle(_E.CLAIMED)),
            Effect.UNCLAIM: self._presence.unclaim,
            Effect.LOCK: self._lock,
            Effect.UNLOCK: self._unlock,
            Effect.CROSS: self._cross,
            Effect.CANCEL: self._presence.cancel,
            Effect.DISCARD: lambda: access.groups.discard(parcel.peer, True),
            Effect.SAY_ANNOUNCE: lambda: link.say(Kind.ANNOUNCE, number, parcel.announcement),
            Effect.SAY_ENTER: self._ask,
            Effect.SAY_WITHDRAW: lambda: link.say(Kind.WITHDRAW, number),
        }

    def begin(self, own_location: str) -> None:
        """The claims are taken in the order of the two locations."""
        if not self._parcel.payload.nbytes:
            self.handle(_E.BEGIN_EMPTY)
        else:
            self.handle(_E.BEGIN_HERE if own_location < self._parcel.peer else _E.BEGIN_THERE)

    def handle(self, event: SenderEvent, reason: str = "") -> None:
        """Something happened; `reason` if it may be the end. Raises IllegalTransition."""
        if self.state in SENDER_FINAL:
            return
        state, effects = sender_step(self.state, event)
        self._reason = self._reason or reason
        self.state = state
        self._disarm()
        for effect in effects:
            self._effects[effect]()
        if state is _S.HELD_OFF:
            self.held_off += 1
        if state in SENDER_FINAL and not self.over.done():
            self._settle()

    def ready(self, key: str) -> None:
        """The receiver is, in the group of that key. Raises IllegalTransition."""
        self._slot = self._access.groups.use(self._parcel.peer, True, key)
        self.handle(_E.READY)

    def meet(self, body: bytes) -> None:
        """The receiver says what a new group needs. Raises FrameError."""
        self._presence.meeting.hear(body)

    def give_up(self, reason: str) -> None:
        """By this end. `over` comes when the library is left."""
        if self.state is _S.START:
            # Nothing has happened yet.
            self.state, self._reason = _S.ABORTED, reason
            self._settle()
        else:
            self.handle(_E.GIVE_UP, reason)

    # ---- effects ----

    def _lock(self) -> None:
        self._pacing = asyncio.get_running_loop().create_task(self._lock_paced())

    async def _lock_paced(self) -> None:
        await self._pacer.take(self._piece().nbytes)
        self._pacing = None
        self._presence.lock(lambda: self.handle(_E.LOCKED))

    def _unlock(self) -> None:
        if self._pacing is not None:
            self._pacing.cancel()
            self._pacing = None
        self._presence.unlock()

    def _ask(self) -> None:
        self._link.say(Kind.ENTER, self.number)
        timeout_s = self._limits.answer_timeout_s
        reason = f"the receiver doesn't say within {timeout_s} s whether to enter"
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self.give_up, reason)

    def _cross(self) -> None:
        assert self._slot is not None
        self._presence.send(self._slot, self._piece(), self._crossed, timeout_s=self._limits.crossing_timeout_s)

    def _crossed(self, failure: str | None) -> None:
        if failure is not None:
            self.handle(_E.BROKEN, failure)
            return
        self._offset += self._limits.piece_bytes
        last = self._offset >= self._parcel.payload.nbytes
        self.handle(_E.LAST_CROSSED if last else _E.PIECE_CROSSED)

    def _piece(self) -> memoryview:
        return self._parcel.payload[self._offset : self._offset + self._limits.piece_bytes]

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _settle(self) -> None:
        if self.state is _S.DONE:
            self.over.set_result(None)
        else:
            self.over.set_exception(TransportError(self._reason or "given up"))
