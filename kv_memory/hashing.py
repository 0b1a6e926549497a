"""A hash of what a rectangle holds, to compare both ends of a move in debug runs."""

import hashlib
import struct

from meshift.kv_memory.endpoint import KvReader
from meshift.kv_memory.rectangle import Rectangle

HASH_TOKENS = 256
"""Tokens that are read at a time; a part of the hash's definition."""

_DIGEST_BYTES = 16


def kv_hash(kv: KvReader, rectangle: Rectangle) -> str:
    """BLAKE2b of a rectangle's place and bytes, 32 hexadecimal digits: equal at both ends once nothing is
    written any more, and for no other rectangle. Costs about as much as copying it."""
    hasher = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    edges = (rectangle.layer_start, rectangle.layer_end, rectangle.token_start, rectangle.token_end,
             rectangle.head_start, rectangle.head_end)  # fmt: skip
    hasher.update(struct.pack("!6Q", *edges))
    if not rectangle.empty:
        for start in range(rectangle.token_start, rectangle.token_end, HASH_TOKENS):
            end = min(start + HASH_TOKENS, rectangle.token_end)
            hasher.update(kv.gather(Rectangle(*edges[:2], start, end, *edges[4:])))
    return hasher.hexdigest()
