"""The life of a request in the simulated engine: one table."""

from enum import Enum, auto


class RequestState(Enum):
    """Where a request is."""

    WAITING = auto()
    """Queued; holds no memory."""
    PREFILL = auto()
    """In the prefill batch that is being computed."""
    JOINING = auto()
    """Its KV is there; enters the decode batch at the next step boundary."""
    RUNNING = auto()
    """In the decode batch."""
    FROZEN = auto()
    """Out of the batch or the queue at a move's end; keeps its memory."""
    GONE = auto()


class RequestEvent(Enum):
    """What happens to it."""

    ADMIT = auto()
    ARRIVE = auto()
    """Its KV was copied here."""
    PREFILLED = auto()
    JOIN = auto()
    PREEMPT = auto()
    FREEZE = auto()
    RESUME = auto()
    REQUEUE = auto()
    """It was frozen while it waited, and waits again."""
    END = auto()
    """Finished, cancelled, or released to the destination of its move."""


class ImpossibleTransition(Exception):
    """A bug: the table doesn't have it."""


_S, _E = RequestState, RequestEvent
TRANSITIONS: dict[tuple[RequestState, RequestEvent], RequestState] = {
    (_S.WAITING, _E.ADMIT): _S.PREFILL,
    (_S.WAITING, _E.ARRIVE): _S.JOINING,
    (_S.WAITING, _E.FREEZE): _S.FROZEN,
    (_S.WAITING, _E.END): _S.GONE,
    (_S.PREFILL, _E.PREFILLED): _S.RUNNING,
    (_S.PREFILL, _E.END): _S.GONE,
    (_S.JOINING, _E.JOIN): _S.RUNNING,
    (_S.JOINING, _E.END): _S.GONE,
    (_S.RUNNING, _E.PREEMPT): _S.WAITING,
    (_S.RUNNING, _E.FREEZE): _S.FROZEN,
    (_S.RUNNING, _E.END): _S.GONE,
    (_S.FROZEN, _E.RESUME): _S.JOINING,
    (_S.FROZEN, _E.REQUEUE): _S.WAITING,
    (_S.FROZEN, _E.END): _S.GONE,
}


def next_state(state: RequestState, event: RequestEvent) -> RequestState:
    """The state after `event`. Raises ImpossibleTransition."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise ImpossibleTransition(f"{event.name} while {state.name}") from None
