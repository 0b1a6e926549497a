"""The life of a change of the layout at its worker: one table."""

from enum import StrEnum

from meshift.schemas.errors import InternalError
from meshift.schemas.reconfiguring import LayoutStep, WorkerPhase


class ChangeEvent(StrEnum):
    """What happens to it."""

    DONE = "done"
    RESIZE = "resize"
    """The coordinator orders it; so do the next three."""
    COPY = "copy"
    COMMIT = "commit"
    ABORT = "abort"
    """Or nobody asks for it any more, or the instance leaves."""
    REFUSED = "refused"
    """Not now: it is as it was before that step."""
    BROKEN = "broken"
    """Something failed before COMMIT was in the log."""
    ENDED = "ended"
    """The engine has undone it by itself: its deadline came."""
    UNDECIDED = "undecided"
    """The engine didn't answer: COMMIT may be in the log."""
    TOO_LATE = "too_late"
    """It was to be undone, and COMMIT is in the log."""


_P, _E = WorkerPhase, ChangeEvent

TRANSITIONS: dict[tuple[WorkerPhase, ChangeEvent], WorkerPhase] = {
    (_P.BEGINNING, _E.DONE): _P.BEGUN,
    (_P.BEGINNING, _E.REFUSED): _P.ABORTED,
    (_P.BEGINNING, _E.BROKEN): _P.ABORTING,
    (_P.BEGUN, _E.RESIZE): _P.RESIZING,
    (_P.BEGUN, _E.ABORT): _P.ABORTING,
    (_P.BEGUN, _E.ENDED): _P.RESTORING,
    (_P.RESIZING, _E.DONE): _P.RESIZED,
    (_P.RESIZING, _E.BROKEN): _P.ABORTING,
    (_P.RESIZED, _E.COPY): _P.STARTING,
    (_P.RESIZED, _E.ABORT): _P.ABORTING,
    (_P.RESIZED, _E.ENDED): _P.RESTORING,
    (_P.STARTING, _E.DONE): _P.COPYING,
    (_P.STARTING, _E.BROKEN): _P.ABORTING,
    (_P.COPYING, _E.COMMIT): _P.CLOSING,
    (_P.COPYING, _E.ABORT): _P.ABORTING,
    (_P.COPYING, _E.ENDED): _P.RESTORING,
    (_P.CLOSING, _E.DONE): _P.COMMITTING,
    (_P.CLOSING, _E.REFUSED): _P.COPYING,
    (_P.CLOSING, _E.ABORT): _P.ABORTING,
    (_P.COMMITTING, _E.DONE): _P.GROWING,
    (_P.COMMITTING, _E.REFUSED): _P.COPYING,
    (_P.COMMITTING, _E.BROKEN): _P.ABORTING,
    (_P.COMMITTING, _E.UNDECIDED): _P.ASKING,
    (_P.ASKING, _E.DONE): _P.GROWING,
    (_P.ASKING, _E.ENDED): _P.RESTORING,
    (_P.ASKING, _E.UNDECIDED): _P.ASKING,
    (_P.GROWING, _E.DONE): _P.COMMITTED,
    (_P.ABORTING, _E.DONE): _P.RESTORING,
    (_P.ABORTING, _E.TOO_LATE): _P.ASKING,
    (_P.ABORTING, _E.UNDECIDED): _P.ABORTING,
    (_P.RESTORING, _E.DONE): _P.ABORTED,
}

FINAL = frozenset({_P.COMMITTED, _P.ABORTED})

RESTING = frozenset({_P.BEGUN, _P.RESIZED, _P.COPYING})
"""Where it waits for an order. Without one it is undone, by its lease or its deadline."""

ACCEPTED = {_P.BEGUN: LayoutStep.RESIZE, _P.RESIZED: LayoutStep.COPY, _P.COPYING: LayoutStep.COMMIT}
"""The next order, beside to abort. An earlier one has been obeyed."""


def next_phase(phase: WorkerPhase, event: ChangeEvent) -> WorkerPhase:
    """The phase after `event`. Raises InternalError for a pair that the table doesn't have."""
    try:
        return TRANSITIONS[phase, event]
    except KeyError:
        raise InternalError(f"a change of the layout that is {phase} can't take {event}") from None
