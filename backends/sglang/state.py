"""The state that a request takes with it, as the mesh carries it."""

import msgspec

from meshift.backends.base import MoveRefused, Refusal
from meshift.backends.sglang.wire_moves import STATE_VERSION, MovedState

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(MovedState)


def pack_state(state: MovedState) -> bytes:
    """For `FrozenRequest.state`."""
    return _encoder.encode(state)


def unpack_state(data: bytes) -> MovedState:
    """Raises MoveRefused unless it is that of an engine of this kind and version."""
    try:
        state = _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise MoveRefused(f"not the state of an SGLang engine: {error}", Refusal.INCOMPATIBLE) from None
    if state.version != STATE_VERSION:
        raise MoveRefused(f"state of version {state.version}, not {STATE_VERSION}", Refusal.INCOMPATIBLE)
    return state
