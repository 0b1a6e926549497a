"""The wire format: everything survives it, and nothing else gets through."""

import random
import zlib
from dataclasses import replace

import pytest

from meshift.kv_memory.rectangle import Rectangle
from meshift.kv_memory.transport import frames
from meshift.kv_memory.transport.base import Patch, TransportError
from meshift.kv_memory.transport.frames import FrameError

TOKEN = "ab" * frames.TOKEN_BYTES
PATCH = Patch("move/0-1", 2**40, 3, Rectangle(1, 5, 7, 2**33, 2, 4), b"payload", zlib.crc32(b"payload"))


def unpack(raw: bytes) -> tuple[frames.PatchHead, str]:
    head = frames.unpack_patch_head(raw[: frames.PATCH_HEAD_BYTES])
    return head, frames.unpack_transfer_id(head, raw[: frames.PATCH_HEAD_BYTES], raw[frames.PATCH_HEAD_BYTES :])


def test_patch_survives() -> None:
    head, transfer_id = unpack(frames.pack_patch(PATCH, TOKEN, 9))
    assert (head.sequence, head.token, transfer_id) == (9, TOKEN, PATCH.transfer_id)
    assert (head.watermark, head.generation, head.rectangle) == (PATCH.watermark, PATCH.generation, PATCH.rectangle)
    assert (head.payload_bytes, head.checksum) == (7, PATCH.checksum)


@pytest.mark.parametrize("refusal", [None, "", "slots are gone", "ü" * 2000])
def test_answer_survives(refusal: str | None) -> None:
    raw = frames.pack_answer(5, refusal)
    head = frames.unpack_answer_head(raw[: frames.ANSWER_HEAD_BYTES])
    assert (head.sequence, head.applied) == (5, refusal is None)
    reason = raw[frames.ANSWER_HEAD_BYTES :]
    assert head.reason_bytes == len(reason) <= frames.REASON_BYTES_MAX
    assert (refusal or "").encode().startswith(reason)


def test_every_flipped_bit_of_a_head_is_noticed() -> None:
    raw = frames.pack_patch(PATCH, TOKEN, 9)
    for bit in range(len(raw) * 8):
        spoiled = bytearray(raw)
        spoiled[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameError):
            unpack(bytes(spoiled))


def test_garbage_is_an_error_and_nothing_else() -> None:
    seed = 4
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(500):
        with pytest.raises(FrameError):
            frames.unpack_patch_head(rng.randbytes(frames.PATCH_HEAD_BYTES))
        with pytest.raises(FrameError):
            frames.unpack_answer_head(rng.randbytes(frames.ANSWER_HEAD_BYTES))


@pytest.mark.parametrize(
    "patch",
    [
        replace(PATCH, transfer_id="x" * 600),
        replace(PATCH, watermark=2**63),
        replace(PATCH, checksum=-1),
        replace(PATCH, rectangle=Rectangle(0, 2**64, 0, 1, 0, 1)),
    ],
)
def test_what_cannot_be_expressed_is_refused(patch: Patch) -> None:
    with pytest.raises(TransportError):
        frames.pack_patch(patch, TOKEN, 0)


@pytest.mark.parametrize("token", ["", "ab", "zz" * frames.TOKEN_BYTES, TOKEN + "0"])
def test_a_token_of_another_form_is_refused(token: str) -> None:
    with pytest.raises(TransportError, match="token"):
        frames.pack_patch(PATCH, token, 0)


def test_lengths_are_bounded() -> None:
    raw = bytearray(frames.pack_patch(PATCH, TOKEN, 0)[: frames.PATCH_HEAD_BYTES])
    raw[4:6] = (60_000).to_bytes(2, "big")
    with pytest.raises(FrameError, match="60000"):
        frames.unpack_patch_head(raw)
    answer = bytearray(frames.pack_answer(0, None))
    answer[-2:] = (60_000).to_bytes(2, "big")
    with pytest.raises(FrameError, match="60000"):
        frames.unpack_answer_head(answer)
