"""What goes over a byte stream between two ranks: patches one way, answers the other.

    patch    head (fixed size) | transfer id | payload
    answer   head (fixed size) | reason

All integers are big-endian. A head names the lengths of what follows, which are checked against bounds
before anything is allocated, and carries a checksum of itself and the transfer id; the payload's is the
patch's own."""

import struct
import zlib
from dataclasses import dataclass

from meshift.kv_memory.rectangle import Rectangle
from meshift.kv_memory.transport.base import Patch, TransportError

TOKEN_BYTES = 32
TRANSFER_ID_BYTES_MAX = 512
REASON_BYTES_MAX = 1024

_PATCH_MAGIC = b"mKP1"
_ANSWER_MAGIC = b"mKA1"
_PATCH_HEAD = struct.Struct("!4s H Q 32s q q 6Q Q I I".replace(" ", ""))
_ANSWER_HEAD = struct.Struct("!4s Q ? H".replace(" ", ""))
_CHECKSUM_BYTES = 4

Raw = bytes | bytearray | memoryview

PATCH_HEAD_BYTES = _PATCH_HEAD.size
ANSWER_HEAD_BYTES = _ANSWER_HEAD.size


class FrameError(Exception):
    """The peer doesn't speak this protocol: garbage, or another version."""


@dataclass(frozen=True, slots=True)
class PatchHead:
    """All of a patch but its transfer id and its payload."""

    sequence: int
    """Of the patch on its connection, from 0."""
    token: str
    transfer_id_bytes: int
    watermark: int
    generation: int
    rectangle: Rectangle
    payload_bytes: int
    checksum: int
    head_checksum: int


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """How it went with a patch."""

    sequence: int
    applied: bool
    reason_bytes: int


def pack_patch(patch: Patch, token: str, sequence: int) -> bytes:
    """Head and transfer id. Raises TransportError for what can't be expressed."""
    name, rectangle = patch.transfer_id.encode(), patch.rectangle
    if len(name) > TRANSFER_ID_BYTES_MAX:
        raise TransportError(f"a transfer id of {len(name)} bytes; {TRANSFER_ID_BYTES_MAX} are allowed")
    try:
        head = _PATCH_HEAD.pack(
            _PATCH_MAGIC, len(name), sequence, _token_bytes(token), patch.watermark, patch.generation,
            rectangle.layer_start, rectangle.layer_end, rectangle.token_start, rectangle.token_end,
            rectangle.head_start, rectangle.head_end, memoryview(patch.payload).nbytes, patch.checksum, 0,
        )  # fmt: skip
    except struct.error as error:
        raise TransportError(f"patch of transfer {patch.transfer_id} can't be expressed: {error}") from None
    body = head[:-_CHECKSUM_BYTES]
    return body + zlib.crc32(name, zlib.crc32(body)).to_bytes(_CHECKSUM_BYTES, "big") + name


def unpack_patch_head(raw: Raw) -> PatchHead:
    """Raises FrameError."""
    if len(raw) != PATCH_HEAD_BYTES:
        raise FrameError("a patch is cut short")
    magic, name_bytes, sequence, token, watermark, generation, *rest = _PATCH_HEAD.unpack(raw)
    if magic != _PATCH_MAGIC:
        raise FrameError("not a patch")
    *edges, payload_bytes, checksum, head_checksum = rest
    if name_bytes > TRANSFER_ID_BYTES_MAX:
        raise FrameError(f"a transfer id of {name_bytes} bytes")
    try:
        rectangle = Rectangle(*edges)
    except ValueError as error:
        raise FrameError(str(error)) from None
    return PatchHead(
        sequence, token.hex(), name_bytes, watermark, generation, rectangle, payload_bytes, checksum, head_checksum
    )


def unpack_transfer_id(head: PatchHead, raw_head: Raw, raw: Raw) -> str:
    """The transfer id of a patch, once head and id are checked. Raises FrameError."""
    if zlib.crc32(raw, zlib.crc32(raw_head[:-_CHECKSUM_BYTES])) != head.head_checksum:
        raise FrameError("the checksum of a head is wrong")
    try:
        return str(raw, "utf-8")
    except UnicodeDecodeError:
        raise FrameError("a transfer id is not UTF-8") from None


def pack_answer(sequence: int, refusal: str | None) -> bytes:
    """`refusal` is why the patch was not applied, or None; it is cut to its bound."""
    reason = (refusal or "").encode(errors="replace")[:REASON_BYTES_MAX]
    return _ANSWER_HEAD.pack(_ANSWER_MAGIC, sequence, refusal is None, len(reason)) + reason


def unpack_answer_head(raw: Raw) -> AnswerHead:
    """Raises FrameError."""
    if len(raw) != ANSWER_HEAD_BYTES:
        raise FrameError("an answer is cut short")
    magic, sequence, applied, reason_bytes = _ANSWER_HEAD.unpack(raw)
    if magic != _ANSWER_MAGIC:
        raise FrameError("not an answer")
    if reason_bytes > REASON_BYTES_MAX:
        raise FrameError(f"a reason of {reason_bytes} bytes")
    return AnswerHead(sequence, applied, reason_bytes)


def _token_bytes(token: str) -> bytes:
    try:
        raw = bytes.fromhex(token)
    except ValueError:
        raw = b""
    if len(raw) != TOKEN_BYTES:
        raise TransportError("the address holds no token of this transport")
    return raw
