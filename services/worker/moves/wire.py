"""Between the messages of moves and what engines take."""

from meshift.backends.base import MoveKey, Refusal, Reserved
from meshift.kv_memory.layout import KvLayout
from meshift.kv_memory.transport.base import Address
from meshift.schemas.errors import InvalidRequest, MeshError, MessageTooLarge, PeerGone, PeerTimeout, Stale
from meshift.schemas.identity import RequestKey
from meshift.schemas.limits import REASON_CHARS_MAX
from meshift.schemas.moves import MoveLayout, MoveRefusal, MoveRoom, MoveTarget


def move_key(destination: RequestKey) -> MoveKey:
    """The engines' name of the move that gives the destination this key."""
    return MoveKey(*destination)


def refusal_of(refusal: Refusal) -> MoveRefusal:
    """The same word on the wire."""
    return MoveRefusal(refusal.value)


def refusal_of_error(error: MeshError) -> MoveRefusal:
    """What a peer's error, or its silence, means for a move."""
    if isinstance(error, Stale):
        return MoveRefusal.STALE
    if isinstance(error, PeerGone | PeerTimeout):
        return MoveRefusal.UNREACHABLE
    return MoveRefusal.INCOMPATIBLE if isinstance(error, InvalidRequest | MessageTooLarge) else MoveRefusal.BUSY


def shortened(reason: object) -> str:
    """A reason that fits into a message."""
    return str(reason)[:REASON_CHARS_MAX]


def pack_layout(layout: KvLayout) -> MoveLayout:
    """For a message."""
    return MoveLayout(
        layer_ranges=layout.layer_ranges,
        head_ranges=layout.head_ranges,
        head_dim=layout.head_dim,
        dtype=layout.dtype,
        weights=layout.weights,
    )


def unpack_layout(layout: MoveLayout) -> KvLayout:
    """From a message."""
    return KvLayout(layout.layer_ranges, layout.head_ranges, layout.head_dim, layout.dtype, layout.weights)


def pack_room(reserved: Reserved, epoch: int) -> MoveRoom:
    """For a message."""
    targets = tuple(
        MoveTarget(scheme=target.scheme, location=target.location, rank=target.rank, token=target.token)
        for target in reserved.targets
    )
    layout = pack_layout(reserved.layout)
    return MoveRoom(slots=reserved.slots, cached=reserved.cached, layout=layout, targets=targets, epoch=epoch)


def unpack_room(room: MoveRoom) -> Reserved:
    """From a message."""
    targets = tuple(Address(target.scheme, target.location, target.rank, target.token) for target in room.targets)
    return Reserved(room.slots, room.cached, unpack_layout(room.layout), targets)
