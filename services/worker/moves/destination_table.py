"""The life of a move at its destination, as one table.

    NEW -> RESERVING -> RESERVED -> COMMITTING -> COMMITTED
    from anywhere before the commit -> ABORTED

What is committed or aborted is remembered for a while (`tombstone_s`), to answer what comes late: the first never is
taken back, the second never is committed.
"""

from enum import StrEnum

from meshift.schemas.errors import InternalError


class DestinationState(StrEnum):
    """What the destination knows of a move."""

    NEW = "new"
    """Nothing."""
    RESERVING = "reserving"
    """Its engine makes room."""
    RESERVED = "reserved"
    COMMITTING = "committing"
    """Its engine takes the request in."""
    COMMITTED = "committed"
    """It owns the request, or did."""
    ABORTED = "aborted"
    """It doesn't, and never will."""


class DestinationEvent(StrEnum):
    """What happens: messages of the source, and what the engine says."""

    RESERVE = "reserve"
    COMMIT = "commit"
    QUESTION = "question"
    ABORT = "abort"
    ROOM = "room"
    NO_ROOM = "no_room"
    DONE = "done"
    """The engine has committed."""
    FAILED = "failed"
    """It has not."""
    EXPIRED = "expired"
    """Nobody renewed the reservation."""


_S, _E = DestinationState, DestinationEvent

TRANSITIONS: dict[tuple[DestinationState, DestinationEvent], DestinationState] = {
    (_S.NEW, _E.RESERVE): _S.RESERVING,
    (_S.NEW, _E.COMMIT): _S.ABORTED,
    (_S.NEW, _E.QUESTION): _S.ABORTED,
    (_S.NEW, _E.ABORT): _S.ABORTED,
    (_S.RESERVING, _E.RESERVE): _S.RESERVING,
    (_S.RESERVING, _E.ROOM): _S.RESERVED,
    (_S.RESERVING, _E.NO_ROOM): _S.NEW,
    (_S.RESERVING, _E.COMMIT): _S.ABORTED,
    (_S.RESERVING, _E.QUESTION): _S.ABORTED,
    (_S.RESERVING, _E.ABORT): _S.ABORTED,
    (_S.RESERVED, _E.RESERVE): _S.RESERVED,
    (_S.RESERVED, _E.ROOM): _S.RESERVED,
    (_S.RESERVED, _E.NO_ROOM): _S.RESERVED,
    (_S.RESERVED, _E.COMMIT): _S.COMMITTING,
    (_S.RESERVED, _E.QUESTION): _S.ABORTED,
    (_S.RESERVED, _E.ABORT): _S.ABORTED,
    (_S.RESERVED, _E.EXPIRED): _S.ABORTED,
    (_S.COMMITTING, _E.RESERVE): _S.COMMITTING,
    (_S.COMMITTING, _E.ROOM): _S.COMMITTING,
    (_S.COMMITTING, _E.NO_ROOM): _S.COMMITTING,
    (_S.COMMITTING, _E.COMMIT): _S.COMMITTING,
    (_S.COMMITTING, _E.QUESTION): _S.COMMITTING,
    (_S.COMMITTING, _E.ABORT): _S.COMMITTING,
    (_S.COMMITTING, _E.DONE): _S.COMMITTED,
    (_S.COMMITTING, _E.FAILED): _S.ABORTED,
    (_S.COMMITTED, _E.RESERVE): _S.COMMITTED,
    (_S.COMMITTED, _E.ROOM): _S.COMMITTED,
    (_S.COMMITTED, _E.NO_ROOM): _S.COMMITTED,
    (_S.COMMITTED, _E.COMMIT): _S.COMMITTED,
    (_S.COMMITTED, _E.QUESTION): _S.COMMITTED,
    (_S.COMMITTED, _E.ABORT): _S.COMMITTED,
    (_S.ABORTED, _E.RESERVE): _S.ABORTED,
    (_S.ABORTED, _E.ROOM): _S.ABORTED,
    (_S.ABORTED, _E.NO_ROOM): _S.ABORTED,
    (_S.ABORTED, _E.COMMIT): _S.ABORTED,
    (_S.ABORTED, _E.QUESTION): _S.ABORTED,
    (_S.ABORTED, _E.ABORT): _S.ABORTED,
}

FINAL = frozenset({_S.COMMITTED, _S.ABORTED})


def next_state(state: DestinationState, event: DestinationEvent) -> DestinationState:
    """The state after `event`. Raises InternalError for a pair that the table doesn't have."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise InternalError(f"a move that is {state} at its destination can't take {event}") from None
