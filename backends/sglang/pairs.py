"""Who sends what to whom: the pairs of a move between two layouts, as the ranks get to know them. Pure."""

from collections.abc import Iterable

from meshift.backends.base import MoveKey
from meshift.backends.sglang import wire_moves as wire
from meshift.kv_memory.layout import KvLayout
from meshift.kv_memory.rectangle import Rectangle
from meshift.kv_memory.transfer import Pair, plan_pairs
from meshift.kv_memory.transport.base import Address

HASH_DIGITS = 15
"""Hexadecimal: 60 bits."""


def transfer_id(key: MoveKey) -> str:
    """The name of a move's transfer, the same at both ends."""
    return f"{key.request_id}/{key.attempt}.{key.hop}"


def pairs_of(key: MoveKey, source: KvLayout, destination: KvLayout) -> list[Pair]:
    """Of one token: how many more there are changes no pair. Raises ValueError if a layout can't be cut."""
    sources, destinations = source.rectangles(1), destination.rectangles(1)
    whole = Rectangle(0, source.layer_ranges[-1][1], 0, 1, 0, source.head_ranges[-1][1])
    return plan_pairs(transfer_id(key), whole, sources, destinations)


def part_of(index: int, pair: Pair, rank: int) -> wire.PairPart:
    """What the rank at one end has of a pair."""
    cells = pair.rectangle
    return wire.PairPart(
        pair=index,
        rank=rank,
        transfer_id=pair.transfer_id,
        layer_start=cells.layer_start,
        layer_end=cells.layer_end,
        head_start=cells.head_start,
        head_end=cells.head_end,
    )


def to_wire(address: Address) -> wire.TargetAddress:
    """Between worker and ranks."""
    return wire.TargetAddress(scheme=address.scheme, location=address.location, rank=address.rank, token=address.token)


def from_wire(address: wire.TargetAddress) -> Address:
    """The other way."""
    return Address(address.scheme, address.location, address.rank, address.token)


def layout_of(shares: list[wire.Share], tensor_ranks: int, weights: str) -> KvLayout | None:
    """The layout of an instance, from its ranks' shares in rank order; None if its KV can't move."""
    if any(share.obstacle for share in shares):
        return None
    return KvLayout(
        layer_ranges=tuple((share.layer_start, share.layer_end) for share in shares[::tensor_ranks]),
        head_ranges=tuple((share.head_start, share.head_end) for share in shares[:tensor_ranks]),
        head_dim=shares[0].head_dim,
        dtype=shares[0].dtype,
        weights=weights,
    )


def hashes_of(parts: Iterable[wire.PairHash]) -> tuple[int, ...]:
    """In the pairs' order; each cut to what fits any integer."""
    return tuple(int(part.hash[:HASH_DIGITS], 16) for part in sorted(parts, key=lambda part: part.pair))
