"""The life of a change of layers at a rank: one table. An undeclared pair is a bug.

    OPEN --drain--> DRAINING --empty--> DRAINED --switch--> SWITCHED --settle--> ENDED
      | ^-------roll back------|-----------|                   ^
      |---------------------------lag--> LAGGING ----switch----|
      |--abort, expire--> ABORTING --settle--> ENDED

Nothing is launched from DRAINING until it leaves DRAINED. What a LAGGING rank does can't be taken back.
"""

from enum import StrEnum
from typing import Final


class ChangeState(StrEnum):
    """Where a change is."""

    OPEN = "open"
    """Weights and KV come in the background."""
    DRAINING = "draining"
    """Nothing is launched any more, and something still is."""
    DRAINED = "drained"
    """Nothing is launched."""
    LAGGING = "lagging"
    """The iteration that is the old layout's last one runs."""
    SWITCHED = "switched"
    """New layers; the last patch may be on its way, and memory of the old ones is being freed."""
    ABORTING = "aborting"
    """Writers go quiet, and memory is being freed."""
    ENDED = "ended"


class ChangeEvent(StrEnum):
    """What moves it on."""

    DRAIN = "drain"
    EMPTY = "empty"
    ROLL_BACK = "roll_back"
    LAG = "lag"
    SWITCH = "switch"
    ABORT = "abort"
    EXPIRE = "expire"
    SETTLE = "settle"


_S, _E = ChangeState, ChangeEvent

TRANSITIONS: Final[dict[tuple[ChangeState, ChangeEvent], ChangeState]] = {
    (_S.OPEN, _E.DRAIN): _S.DRAINING,
    (_S.OPEN, _E.LAG): _S.LAGGING,
    (_S.OPEN, _E.ABORT): _S.ABORTING,
    (_S.OPEN, _E.EXPIRE): _S.ABORTING,
    (_S.DRAINING, _E.EMPTY): _S.DRAINED,
    (_S.DRAINING, _E.ROLL_BACK): _S.OPEN,
    (_S.DRAINED, _E.ROLL_BACK): _S.OPEN,
    (_S.DRAINED, _E.SWITCH): _S.SWITCHED,
    (_S.LAGGING, _E.SWITCH): _S.SWITCHED,
    (_S.SWITCHED, _E.SETTLE): _S.ENDED,
    (_S.ABORTING, _E.SETTLE): _S.ENDED,
}
"""All that may happen."""


class IllegalTransition(Exception):
    """An event that can't happen in this state."""


def next_state(state: ChangeState, event: ChangeEvent) -> ChangeState:
    """Where `event` leads from `state`. Raises IllegalTransition."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(f"{event} in state {state}") from None
