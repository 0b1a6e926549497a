"""The two-phase handshake: the lives of one exchange at its sender and at its receiver, as two literal tables.

A library such as NCCL has all operations of a device wait for the one before, whatever communicator they are of, and
an operation waits for its peer. So a rank inside an operation of inference and its peer inside one of a move may wait
for each other for ever (PipeLive, section 6.1). Each rank has therefore

- a **claim**: one exchange at a time may be about to use the library. It holds nothing up but other exchanges. An
  exchange takes the claims of its two ranks in the order of their addresses, so that no circle of waiting can exist;
- a **gate**: operations of inference, any number, or one exchange. Inference passes at once unless one is inside.

Phase 1, announcing: ANNOUNCE, and READY once both claims are there. No library, no gate; it takes as long as it takes.

Phase 2, entering, for each piece; not symmetric. The sender locks its own gate when inference has left it, and says
ENTER. The receiver never waits: it locks its gate, enters first and says ENTERED, or says BUSY. Only after ENTERED does
the sender enter; after BUSY it unlocks, and comes again when the receiver says FREE. So who holds a gate waits only for
the answer of a thread that waits for nothing, or for a peer that is inside already.

An end that gives up is rid of everything at once, but for an operation that it is inside of: that ends first, because
both are inside, or because the other end discards the group when it leaves without having entered.

Both ends of the transport, and the exhaustive search of `tests/unit/kv_memory/test_handshake.py`, run these tables."""

from enum import StrEnum


class Effect(StrEnum):
    """What an end does when it enters a state, in the order in which the table names them."""

    CLAIM = "claim"
    """Queue for this rank's claim; CLAIMED follows."""
    UNCLAIM = "unclaim"
    """Give the claim back, or leave the queue."""
    LOCK = "lock"
    """Lock this rank's gate once inference has left it; LOCKED follows."""
    UNLOCK = "unlock"
    """Open it, or don't wait for it any more."""
    WATCH = "watch"
    """FREED follows once inference has left the gate."""
    CROSS = "cross"
    """Enter the library for one piece; at a receiver ENTERED follows, at both PIECE_CROSSED, LAST_CROSSED or BROKEN."""
    CANCEL = "cancel"
    """Hurry the operation out of the library, as far as that is possible."""
    DISCARD = "discard"
    """Drop the group: an operation of the peer's that waits in it fails, and the next exchange opens a new one."""
    SAY_ANNOUNCE = "say_announce"
    SAY_READY = "say_ready"
    SAY_ENTER = "say_enter"
    SAY_ENTERED = "say_entered"
    SAY_BUSY = "say_busy"
    SAY_FREE = "say_free"
    SAY_WITHDRAW = "say_withdraw"
    """The sender gives up."""
    SAY_REFUSE = "say_refuse"
    """The receiver does."""


class SenderState(StrEnum):
    """Where an exchange is at its sender."""

    START = "start"
    CLAIMING = "claiming"
    """Its own claim comes first."""
    OFFERED = "offered"
    """It has its own, and waits for the receiver's."""
    PROPOSED = "proposed"
    """It waits for the receiver's, which comes first."""
    JOINING = "joining"
    """The receiver's is there; it waits for its own."""
    LOCKING = "locking"
    """Both are there; it waits for inference to leave its gate."""
    ENTERING = "entering"
    """Its gate is locked; the receiver is asked."""
    HELD_OFF = "held_off"
    """Inference is in the receiver's gate; its own is open again."""
    INSIDE = "inside"
    """In the library; so is the receiver."""
    SETTLING = "settling"
    """The receiver has applied all; the last operation is about to end here, too."""
    LEAVING = "leaving"
    """Given up while inside."""
    CROSSED = "crossed"
    """All is sent; the receiver applies it."""
    DONE = "done"
    ABORTED = "aborted"


class SenderEvent(StrEnum):
    """What happens to it there."""

    BEGIN_HERE = "begin_here"
    """This end's address is the lower one."""
    BEGIN_THERE = "begin_there"
    """The receiver's is."""
    BEGIN_EMPTY = "begin_empty"
    """No bytes are to be sent, so the library isn't needed."""
    CLAIMED = "claimed"
    READY = "ready"
    LOCKED = "locked"
    ENTERED = "entered"
    BUSY = "busy"
    FREE = "free"
    PIECE_CROSSED = "piece_crossed"
    """And there are more."""
    LAST_CROSSED = "last_crossed"
    BROKEN = "broken"
    """The library says so, or its deadline."""
    APPLIED = "applied"
    REFUSED = "refused"
    GIVE_UP = "give_up"
    """A deadline, a cancellation, the end of this transport, or the loss of the peer."""


class ReceiverState(StrEnum):
    """Where an exchange is at its receiver."""

    START = "start"
    """It waits for memory."""
    CLAIMING = "claiming"
    READY = "ready"
    """It has its claim, and waits for the sender to enter."""
    HELD_OFF = "held_off"
    """It has sent the sender back, and calls it when inference has left its gate."""
    ENTERING = "entering"
    """Its gate is locked; it enters, alone as yet."""
    INSIDE = "inside"
    """In the library; the sender comes, or is there."""
    INSIDE_ASKED = "inside_asked"
    """The sender is through already, and was sent back with its next piece."""
    LEAVING = "leaving"
    """Given up while inside."""
    DONE = "done"
    """All is here."""
    ABORTED = "aborted"


class ReceiverEvent(StrEnum):
    """What happens to it there."""

    BEGIN = "begin"
    """There is memory for it."""
    CLAIMED = "claimed"
    ENTER_FREE = "enter_free"
    """The sender wants to enter, and this gate was free: now it is locked."""
    ENTER_BUSY = "enter_busy"
    """The sender wants to enter, and this gate isn't free."""
    ENTERED = "entered"
    """Its operation is in the library."""
    FREED = "freed"
    PIECE_CROSSED = "piece_crossed"
    LAST_CROSSED = "last_crossed"
    BROKEN = "broken"
    WITHDRAWN = "withdrawn"
    """By the sender, or the sender is lost."""
    GIVE_UP = "give_up"
    """A deadline, the end of the transfer or of this transport."""


_S, _SE, _R, _RE, _F = SenderState, SenderEvent, ReceiverState, ReceiverEvent, Effect

SenderTable = dict[tuple[SenderState, SenderEvent], tuple[SenderState, tuple[Effect, ...]]]
ReceiverTable = dict[tuple[ReceiverState, ReceiverEvent], tuple[ReceiverState, tuple[Effect, ...]]]

SENDER: SenderTable = {
    (_S.START, _SE.BEGIN_HERE): (_S.CLAIMING, (_F.CLAIM,)),
    (_S.START, _SE.BEGIN_THERE): (_S.PROPOSED, (_F.SAY_ANNOUNCE,)),
    (_S.START, _SE.BEGIN_EMPTY): (_S.CROSSED, (_F.SAY_ANNOUNCE,)),
    (_S.CLAIMING, _SE.CLAIMED): (_S.OFFERED, (_F.SAY_ANNOUNCE,)),
    (_S.CLAIMING, _SE.GIVE_UP): (_S.ABORTED, (_F.UNCLAIM,)),
    (_S.OFFERED, _SE.READY): (_S.LOCKING, (_F.LOCK,)),
    (_S.OFFERED, _SE.REFUSED): (_S.ABORTED, (_F.UNCLAIM,)),
    (_S.OFFERED, _SE.GIVE_UP): (_S.ABORTED, (_F.SAY_WITHDRAW, _F.UNCLAIM)),
    (_S.PROPOSED, _SE.READY): (_S.JOINING, (_F.CLAIM,)),
    (_S.PROPOSED, _SE.REFUSED): (_S.ABORTED, ()),
    (_S.PROPOSED, _SE.GIVE_UP): (_S.ABORTED, (_F.SAY_WITHDRAW,)),
    (_S.JOINING, _SE.CLAIMED): (_S.LOCKING, (_F.LOCK,)),
    (_S.JOINING, _SE.REFUSED): (_S.ABORTED, (_F.UNCLAIM,)),
    (_S.JOINING, _SE.GIVE_UP): (_S.ABORTED, (_F.SAY_WITHDRAW, _F.UNCLAIM)),
    (_S.LOCKING, _SE.LOCKED): (_S.ENTERING, (_F.SAY_ENTER,)),
    (_S.LOCKING, _SE.REFUSED): (_S.ABORTED, (_F.UNLOCK, _F.UNCLAIM)),
    (_S.LOCKING, _SE.GIVE_UP): (_S.ABORTED, (_F.SAY_WITHDRAW, _F.UNLOCK, _F.UNCLAIM)),
    (_S.ENTERING, _SE.ENTERED): (_S.INSIDE, (_F.CROSS,)),
    (_S.ENTERING, _SE.BUSY): (_S.HELD_OFF, (_F.UNLOCK,)),
    # The receiver may be entering, and would wait there.
    (_S.ENTERING, _SE.REFUSED): (_S.ABORTED, (_F.DISCARD, _F.UNLOCK, _F.UNCLAIM)),
    (_S.ENTERING, _SE.GIVE_UP): (_S.ABORTED, (_F.SAY_WITHDRAW, _F.DISCARD, _F.UNLOCK, _F.UNCLAIM)),
    (_S.HELD_OFF, _SE.FREE): (_S.LOCKING, (_F.LOCK,)),
    (_S.HELD_OFF, _SE.REFUSED): (_S.ABORTED, (_F.UNCLAIM,)),
    (_S.HELD_OFF, _SE.GIVE_UP): (_S.ABORTED, (_F.SAY_WITHDRAW, _F.UNCLAIM)),
    (_S.INSIDE, _SE.PIECE_CROSSED): (_S.LOCKING, (_F.UNLOCK, _F.LOCK)),
    (_S.INSIDE, _SE.LAST_CROSSED): (_S.CROSSED, (_F.UNLOCK, _F.UNCLAIM)),
    (_S.INSIDE, _SE.BROKEN): (_S.ABORTED, (_F.SAY_WITHDRAW, _F.DISCARD, _F.UNLOCK, _F.UNCLAIM)),
    (_S.INSIDE, _SE.APPLIED): (_S.SETTLING, ()),
    (_S.INSIDE, _SE.REFUSED): (_S.LEAVING, (_F.CANCEL,)),
    (_S.INSIDE, _SE.GIVE_UP): (_S.LEAVING, (_F.SAY_WITHDRAW, _F.CANCEL)),
    (_S.SETTLING, _SE.LAST_CROSSED): (_S.DONE, (_F.UNLOCK, _F.UNCLAIM)),
    (_S.SETTLING, _SE.BROKEN): (_S.DONE, (_F.DISCARD, _F.UNLOCK, _F.UNCLAIM)),
    (_S.SETTLING, _SE.GIVE_UP): (_S.LEAVING, (_F.CANCEL,)),
    (_S.LEAVING, _SE.PIECE_CROSSED): (_S.ABORTED, (_F.DISCARD, _F.UNLOCK, _F.UNCLAIM)),
    (_S.LEAVING, _SE.LAST_CROSSED): (_S.ABORTED, (_F.DISCARD, _F.UNLOCK, _F.UNCLAIM)),
    (_S.LEAVING, _SE.BROKEN): (_S.ABORTED, (_F.DISCARD, _F.UNLOCK, _F.UNCLAIM)),
    (_S.LEAVING, _SE.REFUSED): (_S.LEAVING, ()),
    (_S.LEAVING, _SE.APPLIED): (_S.LEAVING, ()),
    (_S.LEAVING, _SE.GIVE_UP): (_S.LEAVING, ()),
    (_S.CROSSED, _SE.APPLIED): (_S.DONE, ()),
    (_S.CROSSED, _SE.REFUSED): (_S.ABORTED, ()),
    (_S.CROSSED, _SE.GIVE_UP): (_S.ABORTED, (_F.SAY_WITHDRAW,)),
}
"""At the sender. Any other pair raises."""

RECEIVER: ReceiverTable = {
    (_R.START, _RE.BEGIN): (_R.CLAIMING, (_F.CLAIM,)),
    (_R.START, _RE.WITHDRAWN): (_R.ABORTED, ()),
    (_R.START, _RE.GIVE_UP): (_R.ABORTED, (_F.SAY_REFUSE,)),
    (_R.CLAIMING, _RE.CLAIMED): (_R.READY, (_F.SAY_READY,)),
    (_R.CLAIMING, _RE.WITHDRAWN): (_R.ABORTED, (_F.UNCLAIM,)),
    (_R.CLAIMING, _RE.GIVE_UP): (_R.ABORTED, (_F.SAY_REFUSE, _F.UNCLAIM)),
    (_R.READY, _RE.ENTER_FREE): (_R.ENTERING, (_F.CROSS,)),
    (_R.READY, _RE.ENTER_BUSY): (_R.HELD_OFF, (_F.SAY_BUSY, _F.WATCH)),
    (_R.READY, _RE.WITHDRAWN): (_R.ABORTED, (_F.UNCLAIM,)),
    (_R.READY, _RE.GIVE_UP): (_R.ABORTED, (_F.SAY_REFUSE, _F.UNCLAIM)),
    (_R.HELD_OFF, _RE.FREED): (_R.READY, (_F.SAY_FREE,)),
    (_R.HELD_OFF, _RE.WITHDRAWN): (_R.ABORTED, (_F.UNLOCK, _F.UNCLAIM)),
    (_R.HELD_OFF, _RE.GIVE_UP): (_R.ABORTED, (_F.SAY_REFUSE, _F.UNLOCK, _F.UNCLAIM)),
    (_R.ENTERING, _RE.ENTERED): (_R.INSIDE, (_F.SAY_ENTERED,)),
    (_R.ENTERING, _RE.BROKEN): (_R.ABORTED, (_F.SAY_REFUSE, _F.DISCARD, _F.UNLOCK, _F.UNCLAIM)),
    (_R.ENTERING, _RE.WITHDRAWN): (_R.LEAVING, (_F.CANCEL,)),
    (_R.ENTERING, _RE.GIVE_UP): (_R.LEAVING, (_F.SAY_REFUSE, _F.CANCEL)),
    (_R.INSIDE, _RE.ENTER_BUSY): (_R.INSIDE_ASKED, (_F.SAY_BUSY,)),
    (_R.INSIDE, _RE.PIECE_CROSSED): (_R.READY, (_F.UNLOCK,)),
    (_R.INSIDE, _RE.LAST_CROSSED): (_R.DONE, (_F.UNLOCK, _F.UNCLAIM)),
    (_R.INSIDE, _RE.BROKEN): (_R.ABORTED, (_F.SAY_REFUSE, _F.DISCARD, _F.UNLOCK, _F.UNCLAIM)),
    (_R.INSIDE, _RE.WITHDRAWN): (_R.LEAVING, (_F.CANCEL,)),
    (_R.INSIDE, _RE.GIVE_UP): (_R.LEAVING, (_F.SAY_REFUSE, _F.CANCEL)),
    (_R.INSIDE_ASKED, _RE.PIECE_CROSSED): (_R.HELD_OFF, (_F.UNLOCK, _F.WATCH)),
    (_R.INSIDE_ASKED, _RE.BROKEN): (_R.ABORTED, (_F.SAY_REFUSE, _F.DISCARD, _F.UNLOCK, _F.UNCLAIM)),
    (_R.INSIDE_ASKED, _RE.WITHDRAWN): (_R.LEAVING, (_F.CANCEL,)),
    (_R.INSIDE_ASKED, _RE.GIVE_UP): (_R.LEAVING, (_F.SAY_REFUSE, _F.CANCEL)),
    (_R.LEAVING, _RE.PIECE_CROSSED): (_R.ABORTED, (_F.DISCARD, _F.UNLOCK, _F.UNCLAIM)),
    (_R.LEAVING, _RE.LAST_CROSSED): (_R.ABORTED, (_F.DISCARD, _F.UNLOCK, _F.UNCLAIM)),
    (_R.LEAVING, _RE.BROKEN): (_R.ABORTED, (_F.DISCARD, _F.UNLOCK, _F.UNCLAIM)),
    (_R.LEAVING, _RE.ENTERED): (_R.LEAVING, ()),
    (_R.LEAVING, _RE.ENTER_BUSY): (_R.LEAVING, ()),
    (_R.LEAVING, _RE.WITHDRAWN): (_R.LEAVING, ()),
    (_R.LEAVING, _RE.GIVE_UP): (_R.LEAVING, ()),
}
"""At the receiver. Any other pair raises."""

SENDER_FINAL = frozenset({SenderState.DONE, SenderState.ABORTED})
RECEIVER_FINAL = frozenset({ReceiverState.DONE, ReceiverState.ABORTED})


class IllegalTransition(Exception):
    """The pair of state and event is in no table: a defect, or a peer that doesn't keep to the protocol."""


def sender_step(
    state: SenderState, event: SenderEvent, table: SenderTable = SENDER
) -> tuple[SenderState, tuple[Effect, ...]]:
    """The next state, and what is to be done. Raises IllegalTransition."""
    try:
        return table[state, event]
    except KeyError:
        raise IllegalTransition(f"{event.value} at a sender that is {state.value}") from None


def receiver_step(
    state: ReceiverState, event: ReceiverEvent, table: ReceiverTable = RECEIVER
) -> tuple[ReceiverState, tuple[Effect, ...]]:
    """The next state, and what is to be done. Raises IllegalTransition."""
    try:
        return table[state, event]
    except KeyError:
        raise IllegalTransition(f"{event.value} at a receiver that is {state.value}") from None
