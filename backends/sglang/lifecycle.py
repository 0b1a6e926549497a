"""The engine's life: one table. An undeclared pair is a bug."""

from enum import StrEnum
from typing import Final


class EngineState(StrEnum):
    """Where an engine is in its life."""

    NEW = "new"
    STARTING = "starting"
    RUNNING = "running"
    FAILED = "failed"
    """A rank died or broke the protocol; the listener knows."""
    STOPPED = "stopped"


class EngineEvent(StrEnum):
    """What moves it on."""

    START = "start"
    READY = "ready"
    FAIL = "fail"
    STOP = "stop"


TRANSITIONS: Final[dict[tuple[EngineState, EngineEvent], EngineState]] = {
    (EngineState.NEW, EngineEvent.START): EngineState.STARTING,
    (EngineState.NEW, EngineEvent.STOP): EngineState.STOPPED,
    (EngineState.STARTING, EngineEvent.READY): EngineState.RUNNING,
    (EngineState.STARTING, EngineEvent.FAIL): EngineState.FAILED,
    (EngineState.STARTING, EngineEvent.STOP): EngineState.STOPPED,
    (EngineState.RUNNING, EngineEvent.FAIL): EngineState.FAILED,
    (EngineState.RUNNING, EngineEvent.STOP): EngineState.STOPPED,
    (EngineState.FAILED, EngineEvent.FAIL): EngineState.FAILED,
    (EngineState.FAILED, EngineEvent.STOP): EngineState.STOPPED,
    (EngineState.STOPPED, EngineEvent.FAIL): EngineState.STOPPED,
    (EngineState.STOPPED, EngineEvent.STOP): EngineState.STOPPED,
}


class IllegalTransition(Exception):
    """An event that can't happen in this state."""


def next_state(state: EngineState, event: EngineEvent) -> EngineState:
    """Where `event` leads from `state`. Raises IllegalTransition."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(f"{event} in state {state}") from None
