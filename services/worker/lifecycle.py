"""The life of an instance, as one table."""

from enum import StrEnum

from meshift.schemas.errors import InternalError
from meshift.schemas.instances import InstanceState


class LifecycleEvent(StrEnum):
    """What happens to an instance."""

    ENGINE_READY = "engine_ready"
    DRAIN = "drain"
    DRAINED = "drained"
    FAILED = "failed"
    SUPERSEDED = "superseded"


_S, _E = InstanceState, LifecycleEvent

TRANSITIONS: dict[tuple[InstanceState, LifecycleEvent], InstanceState] = {
    (_S.STARTING, _E.ENGINE_READY): _S.READY,
    (_S.STARTING, _E.DRAIN): _S.STOPPED,
    (_S.STARTING, _E.FAILED): _S.FAILED,
    (_S.STARTING, _E.SUPERSEDED): _S.STOPPED,
    (_S.READY, _E.DRAIN): _S.DRAINING,
    (_S.READY, _E.FAILED): _S.FAILED,
    (_S.READY, _E.SUPERSEDED): _S.STOPPED,
    (_S.DRAINING, _E.DRAIN): _S.DRAINING,
    (_S.DRAINING, _E.DRAINED): _S.STOPPED,
    (_S.DRAINING, _E.FAILED): _S.FAILED,
    (_S.DRAINING, _E.SUPERSEDED): _S.STOPPED,
}


def next_state(state: InstanceState, event: LifecycleEvent) -> InstanceState:
    """The state after `event`. Raises InternalError for a pair that the table doesn't have."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise InternalError(f"an instance that is {state} can't take {event}") from None


def has_ended(state: InstanceState) -> bool:
    """Whether the instance serves no more."""
    return state in (InstanceState.FAILED, InstanceState.STOPPED)
