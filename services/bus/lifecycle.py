"""The life of an in-process bus client, as one table."""

from enum import Enum, auto


class ClientState(Enum):
    """Where a client is in its life."""

    NEW = auto()
    CONNECTED = auto()
    DISCONNECTED = auto()
    CLOSED = auto()
    KILLED = auto()


class ClientEvent(Enum):
    """What happens to a client."""

    START = auto()
    DISCONNECT = auto()
    RECONNECT = auto()
    CLOSE = auto()
    KILL = auto()


TRANSITIONS: dict[tuple[ClientState, ClientEvent], ClientState] = {
    (ClientState.NEW, ClientEvent.START): ClientState.CONNECTED,
    (ClientState.NEW, ClientEvent.CLOSE): ClientState.CLOSED,
    (ClientState.CONNECTED, ClientEvent.DISCONNECT): ClientState.DISCONNECTED,
    (ClientState.CONNECTED, ClientEvent.CLOSE): ClientState.CLOSED,
    (ClientState.CONNECTED, ClientEvent.KILL): ClientState.KILLED,
    (ClientState.DISCONNECTED, ClientEvent.RECONNECT): ClientState.CONNECTED,
    (ClientState.DISCONNECTED, ClientEvent.CLOSE): ClientState.CLOSED,
    (ClientState.DISCONNECTED, ClientEvent.KILL): ClientState.KILLED,
}


def next_state(state: ClientState, event: ClientEvent) -> ClientState:
    """The state after `event`. Raises RuntimeError for a pair that the table lacks."""
    if (state, event) not in TRANSITIONS:
        raise RuntimeError(f"a bus client that is {state.name.lower()} can't {event.name.lower()}")
    return TRANSITIONS[state, event]
