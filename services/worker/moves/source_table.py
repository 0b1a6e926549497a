"""The life of a move at its source, as one table.

    CHOOSING -> BEGINNING -> RESERVING <-> COPYING      the request goes on meanwhile
                 RESERVING -> FREEZING          it is in no batch from here on
                 FREEZING -> COMMITTING -> RELEASING -> MOVED
    COMMITTING -> ASKING <-> FENCING            the commit's answer was lost: who owns it?
    whatever fails before the commit -> RESUMING -> STAYED

A move that was given up leaves a destination that refuses the same name for ever; to try that destination again the
request first gets a new attempt from its frontend: RAISING, REKEYING.
"""

from enum import StrEnum

from meshift.schemas.errors import InternalError


class SourceState(StrEnum):
    """What the source does now."""

    CHOOSING = "choosing"
    """Finds a destination, where none was named."""
    RAISING = "raising"
    """Asks the frontend for a new attempt, the request going on meanwhile."""
    REKEYING = "rekeying"
    """Tells the engine of it."""
    BEGINNING = "beginning"
    """Asks its engine whether the request can move."""
    RESERVING = "reserving"
    """Asks the destination for room for the next round, with headroom."""
    COPYING = "copying"
    """A live round."""
    RESTARTING = "restarting"
    """The request was preempted: what was copied counts for nothing, and it moves as state only."""
    FREEZING = "freezing"
    """Takes the request out of its batch, and sends the rest."""
    COMMITTING = "committing"
    """Hands it over."""
    ASKING = "asking"
    """Asks the destination whether it has committed; if not, it never will."""
    FENCING = "fencing"
    """Asks the frontend who owns it."""
    RELEASING = "releasing"
    """The destination owns it: the engine frees it."""
    RESUMING = "resuming"
    """The source owns it: it goes on."""
    MOVED = "moved"
    STAYED = "stayed"
    ENDED = "ended"
    """The request is over."""
    REFUSED = "refused"
    """Never begun."""


class SourceEvent(StrEnum):
    """What came of it."""

    CHOSEN = "chosen"
    TRIED = "tried"
    """Chosen, and a move to it was given up in this attempt."""
    BEGUN = "begun"
    ROOM_TO_COPY = "room_to_copy"
    """There is room, and much to send."""
    ROOM_TO_FREEZE = "room_to_freeze"
    """There is room, and little to send, or no KV to be sent at all."""
    NO_KV = "no_kv"
    """No room for KV, or no way to send it: go on as state only."""
    COPIED = "copied"
    FROZEN = "frozen"
    OUTGROWN = "outgrown"
    """More tokens came than there is room for."""
    PREEMPTED = "preempted"
    DECLINED = "declined"
    """There is nowhere to go, or the engine doesn't begin."""
    REFUSED = "refused"
    """By the engine, the destination, or a deadline: it stays."""
    COMMITTED = "committed"
    """The destination owns it: it says so, or the frontend does."""
    NOT_COMMITTED = "not_committed"
    """And never will be."""
    RAISED = "raised"
    """The frontend gave it a new attempt, and the source owns that."""
    NO_ANSWER = "no_answer"
    OVER = "over"
    """The request finished, was cancelled, or is superseded."""
    RELEASED = "released"
    RESUMED = "resumed"


_S, _E = SourceState, SourceEvent

TRANSITIONS: dict[tuple[SourceState, SourceEvent], SourceState] = {
    (_S.CHOOSING, _E.CHOSEN): _S.BEGINNING,
    (_S.CHOOSING, _E.TRIED): _S.RAISING,
    (_S.CHOOSING, _E.DECLINED): _S.REFUSED,
    (_S.CHOOSING, _E.REFUSED): _S.REFUSED,
    (_S.CHOOSING, _E.OVER): _S.ENDED,
    (_S.RAISING, _E.RAISED): _S.REKEYING,
    (_S.RAISING, _E.NO_ANSWER): _S.RAISING,
    (_S.RAISING, _E.OVER): _S.ENDED,
    (_S.REKEYING, _E.RESUMED): _S.BEGINNING,
    (_S.REKEYING, _E.OVER): _S.ENDED,
    (_S.BEGINNING, _E.BEGUN): _S.RESERVING,
    (_S.BEGINNING, _E.DECLINED): _S.REFUSED,
    (_S.BEGINNING, _E.REFUSED): _S.RESUMING,
    (_S.BEGINNING, _E.OVER): _S.RESUMING,
    (_S.RESERVING, _E.ROOM_TO_COPY): _S.COPYING,
    (_S.RESERVING, _E.ROOM_TO_FREEZE): _S.FREEZING,
    (_S.RESERVING, _E.NO_KV): _S.RESERVING,
    (_S.RESERVING, _E.REFUSED): _S.RESUMING,
    (_S.RESERVING, _E.OVER): _S.RESUMING,
    (_S.COPYING, _E.COPIED): _S.RESERVING,
    (_S.COPYING, _E.PREEMPTED): _S.RESTARTING,
    (_S.COPYING, _E.NO_KV): _S.RESERVING,
    (_S.COPYING, _E.REFUSED): _S.RESUMING,
    (_S.COPYING, _E.OVER): _S.RESUMING,
    (_S.RESTARTING, _E.BEGUN): _S.RESERVING,
    (_S.RESTARTING, _E.REFUSED): _S.RESUMING,
    (_S.RESTARTING, _E.OVER): _S.RESUMING,
    (_S.FREEZING, _E.FROZEN): _S.COMMITTING,
    (_S.FREEZING, _E.OUTGROWN): _S.RESERVING,
    (_S.FREEZING, _E.PREEMPTED): _S.RESTARTING,
    (_S.FREEZING, _E.NO_KV): _S.RESERVING,
    (_S.FREEZING, _E.REFUSED): _S.RESUMING,
    (_S.FREEZING, _E.OVER): _S.RESUMING,
    (_S.COMMITTING, _E.COMMITTED): _S.RELEASING,
    (_S.COMMITTING, _E.NOT_COMMITTED): _S.RESUMING,
    (_S.COMMITTING, _E.NO_ANSWER): _S.ASKING,
    (_S.ASKING, _E.COMMITTED): _S.RELEASING,
    (_S.ASKING, _E.NOT_COMMITTED): _S.RESUMING,
    (_S.ASKING, _E.NO_ANSWER): _S.FENCING,
    (_S.ASKING, _E.OVER): _S.RESUMING,
    (_S.FENCING, _E.COMMITTED): _S.RELEASING,
    (_S.FENCING, _E.RAISED): _S.RESUMING,
    (_S.FENCING, _E.NO_ANSWER): _S.ASKING,
    (_S.FENCING, _E.OVER): _S.RESUMING,
    (_S.RELEASING, _E.RELEASED): _S.MOVED,
    (_S.RELEASING, _E.OVER): _S.ENDED,
    (_S.RESUMING, _E.RESUMED): _S.STAYED,
    (_S.RESUMING, _E.OVER): _S.ENDED,
}

FINAL = frozenset({_S.MOVED, _S.STAYED, _S.ENDED, _S.REFUSED})

DEADLINE_HOLDS = frozenset(state for state, event in TRANSITIONS if event is _E.REFUSED)
"""Where the deadline of the whole move ends it before the next thing is done."""

END_HOLDS = frozenset(state for state, event in TRANSITIONS if event is _E.OVER) - {_S.RELEASING, _S.RESUMING}
"""Where the end of the request does."""


def next_state(state: SourceState, event: SourceEvent) -> SourceState:
    """The state after `event`. Raises InternalError for a pair that the table doesn't have."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise InternalError(f"a move that is {state} at its source can't take {event}") from None
