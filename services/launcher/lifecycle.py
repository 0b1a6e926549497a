"""The life of a launched service: one table. An undeclared pair of state and event is a bug and raises."""

from enum import StrEnum


class ChildState(StrEnum):
    """Where a launched service is."""

    STARTING = "starting"
    READY = "ready"
    BACKOFF = "backoff"
    """It died and waits to be started again."""
    STOPPING = "stopping"
    STOPPED = "stopped"
    """It ended because it was asked to, or by its own decision."""
    FAILED = "failed"
    """It died and is not started again."""


class ChildChange(StrEnum):
    """What happens to it."""

    SAID_READY = "said_ready"
    CRASHED = "crashed"
    """Its process ended, and it is to be started again."""
    GAVE_UP = "gave_up"
    """Its process ended, and it is not to be started again."""
    LEFT = "left"
    """Its process ended well."""
    RESTARTED = "restarted"
    STOP_ASKED = "stop_asked"
    GONE = "gone"
    """Its process ended after it was asked to."""


_TABLE: dict[tuple[ChildState, ChildChange], ChildState] = {
    (ChildState.STARTING, ChildChange.SAID_READY): ChildState.READY,
    (ChildState.STARTING, ChildChange.CRASHED): ChildState.BACKOFF,
    (ChildState.STARTING, ChildChange.GAVE_UP): ChildState.FAILED,
    (ChildState.STARTING, ChildChange.LEFT): ChildState.STOPPED,
    (ChildState.STARTING, ChildChange.STOP_ASKED): ChildState.STOPPING,
    (ChildState.READY, ChildChange.CRASHED): ChildState.BACKOFF,
    (ChildState.READY, ChildChange.GAVE_UP): ChildState.FAILED,
    (ChildState.READY, ChildChange.LEFT): ChildState.STOPPED,
    (ChildState.READY, ChildChange.STOP_ASKED): ChildState.STOPPING,
    (ChildState.BACKOFF, ChildChange.RESTARTED): ChildState.STARTING,
    (ChildState.BACKOFF, ChildChange.GAVE_UP): ChildState.FAILED,
    (ChildState.BACKOFF, ChildChange.STOP_ASKED): ChildState.STOPPED,
    (ChildState.STOPPING, ChildChange.GONE): ChildState.STOPPED,
}

ENDED = frozenset({ChildState.STOPPED, ChildState.FAILED})
"""States without a process, now and later."""


class LifecycleError(Exception):
    """A change that the table doesn't declare: a bug of ours."""


def next_state(state: ChildState, change: ChildChange) -> ChildState:
    """The state after `change`. Raises `LifecycleError` if the table has no such pair."""
    try:
        return _TABLE[state, change]
    except KeyError:
        raise LifecycleError(f"a child that is {state} can't have {change}") from None
