"""Sender and receiver of one pair: patches of a round, deadlines, waiting, closing."""

import asyncio
import random
import zlib
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from meshift.kv_memory.endpoint import (
    CHECKSUM_TOKENS,
    GenerationChanged,
    KvReceiver,
    KvSender,
    rectangle_checksum,
)
from meshift.kv_memory.matrix import MatrixKv, MatrixRequest
from meshift.kv_memory.rectangle import Rectangle
from meshift.kv_memory.transfer import Pair
from meshift.kv_memory.transport import FaultRates, Link, MemoryFabric, MemoryTransport, TransportError
from tests.contract.transport_suite import Inbox
from tests.unit.kv_memory.virtual_time import run_virtual

TOKENS = 30
PAIR = Pair("t/0-0", 0, 0, Rectangle(0, 2, 0, TOKENS, 0, 2))


class Rig:
    """One pair, both ends, content written at the source."""

    def __init__(self, *, patch_tokens_max: int = 8, link: Link | None = None) -> None:
        self.fabric = MemoryFabric(link=link)
        self.source_end, self.destination_end = (MemoryTransport(self.fabric, where) for where in "sd")
        self.patch_tokens_max = patch_tokens_max
        self.source, self.sink = (
            MatrixKv(PAIR.rectangle, 64, 4).request(random.Random(where).sample(range(64), TOKENS)) for where in "sd"
        )
        self.content = random.Random(3).randbytes(2 * TOKENS * 2 * 2 * 4 * 4)
        self.source.write(0, self.content)

    async def start(self) -> None:
        await self.source_end.start()
        await self.destination_end.start()
        self.receiver = KvReceiver(self.destination_end, PAIR, self.sink)
        self.sender = KvSender(
            self.source_end,
            self.receiver.open(),
            PAIR,
            self.source,
            patch_tokens_max=self.patch_tokens_max,
        )


def run_rig(test: Callable[[Rig], Awaitable[None]], rig: Rig | None = None) -> None:
    async def main() -> None:
        used = rig or Rig()
        await used.start()
        await test(used)

    run_virtual(main())


def test_only_the_last_patch_of_a_round_carries_its_watermark() -> None:
    async def test(rig: Rig) -> None:
        inbox = Inbox()
        address = rig.destination_end.open_transfer("spy", inbox)
        pair = Pair("spy", 0, 0, PAIR.rectangle)
        sender = KvSender(rig.source_end, address, pair, rig.source, patch_tokens_max=8)
        sent = await sender.send_round([(0, 20)], 20, timeout_s=1)
        assert (sent.watermark, sent.patches, sent.byte_count) == (20, 3, 2 * 20 * 2 * 2 * 4 * 4)
        await sender.send_round([(2, 3), (20, 30)], 30, timeout_s=1)
        assert inbox.watermarks == [0, 0, 20, 20, 20, 30]
        assert [(p.rectangle.token_start, p.rectangle.token_end) for p in inbox.patches] == [
            (0, 8), (8, 16), (16, 20), (2, 3), (20, 28), (28, 30),
        ]  # fmt: skip

    run_rig(test)


def test_an_empty_round_takes_the_watermark_over() -> None:
    async def test(rig: Rig) -> None:
        sent = await rig.sender.send_round([], 12, timeout_s=1)
        assert (sent.patches, sent.byte_count) == (1, 0)
        assert rig.receiver.applied == 12
        outside = await rig.sender.send_round([(TOKENS, TOKENS + 5)], 13, timeout_s=1)
        assert (outside.byte_count, rig.receiver.applied) == (0, 13)

    run_rig(test)


def test_ranges_are_cut_to_the_pair() -> None:
    async def test(rig: Rig) -> None:
        await rig.sender.send_round([(0, 1000)], TOKENS, timeout_s=1)
        assert rig.sink.gather(PAIR.rectangle) == rig.content
        assert rig.receiver.covers(0, TOKENS)

    run_rig(test)


def test_the_deadline_is_the_round_s() -> None:
    async def test(rig: Rig) -> None:
        with pytest.raises(TransportError, match="no answer"):
            await rig.sender.send_round([(0, TOKENS)], TOKENS, timeout_s=3.5)
        assert asyncio.get_running_loop().time() == pytest.approx(3.5)
        assert not rig.receiver.covers(0, TOKENS)
        assert rig.receiver.applied == 0

    # Four patches, each with one second there and one second back.
    run_rig(test, Rig(link=Link(latency_s=1.0)))


def test_generation_is_checked_after_the_copy() -> None:
    class Torn(MatrixRequest):
        """Its pages change under a gather."""

        def gather(self, rectangle: Rectangle) -> bytes:
            payload = super().gather(rectangle)
            self.relocate(range(TOKENS), TOKENS)
            return payload

    async def test(rig: Rig) -> None:
        rig.sender = KvSender(
            rig.source_end, rig.sender._address, PAIR, Torn(MatrixKv(PAIR.rectangle, 64, 4), range(TOKENS))
        )
        with pytest.raises(GenerationChanged, match="0 is 1 now"):
            await rig.sender.send_round([(0, TOKENS)], TOKENS, timeout_s=1)
        assert rig.sender.generation_changed()
        assert not rig.receiver.covers(0, 1)

    run_rig(test)


def test_a_restart_sends_the_new_generation() -> None:
    async def test(rig: Rig) -> None:
        await rig.sender.send_round([(0, TOKENS)], TOKENS, timeout_s=1)
        rig.source.relocate(range(TOKENS), 0)
        rig.source.write(0, rig.content[::-1])
        with pytest.raises(GenerationChanged):
            await rig.sender.send_round([], TOKENS, timeout_s=1)
        rig.sender.restart()
        await rig.sender.send_round([(0, 9)], 9, timeout_s=1)
        assert (rig.receiver.applied, rig.receiver.covers(0, 9)) == (9, True)
        assert not rig.receiver.covers(0, 10)

    run_rig(test)


def test_a_duplicated_patch_changes_nothing() -> None:
    async def test(rig: Rig) -> None:
        rig.fabric.faults = FaultRates(duplicated=1.0)
        await rig.sender.send_round([(0, TOKENS)], TOKENS, timeout_s=1)
        assert rig.sink.gather(PAIR.rectangle) == rig.content
        assert rig.receiver.applied == TOKENS

    run_rig(test)


def test_a_sink_that_fails_breaks_the_pair() -> None:
    class Full(MatrixRequest):
        def scatter(self, rectangle: Rectangle, payload: bytes | memoryview) -> None:
            raise RuntimeError("no such slot")

    async def test(rig: Rig) -> None:
        rig.receiver.close()
        receiver = KvReceiver(rig.destination_end, PAIR, Full(MatrixKv(PAIR.rectangle, 64, 4), range(TOKENS)))
        sender = KvSender(rig.source_end, receiver.open(), PAIR, rig.source)
        with pytest.raises(TransportError, match="no such slot"):
            await sender.send_round([(0, TOKENS)], TOKENS, timeout_s=1)
        assert (receiver.applied, receiver.covers(0, 1)) == (0, False)

    run_rig(test)


# ---- waiting and closing ----


def test_waiting_for_a_watermark() -> None:
    async def test(rig: Rig) -> None:
        await rig.receiver.wait_applied(0, timeout_s=1)
        waits = [asyncio.ensure_future(rig.receiver.wait_applied(w, timeout_s=9)) for w in (5, 20, 30)]
        await asyncio.sleep(0)
        await rig.sender.send_round([(0, 5)], 5, timeout_s=1)
        await asyncio.sleep(0)
        assert [wait.done() for wait in waits] == [True, False, False]
        await rig.sender.send_round([(5, 30)], 30, timeout_s=1)
        await asyncio.gather(*waits)
        assert not rig.receiver._waiting
        timers = getattr(asyncio.get_running_loop(), "_scheduled")  # noqa: B009 - not in the type stubs
        assert [timer for timer in timers if not timer.cancelled()] == []

    run_rig(test)


def test_waiting_ends_at_its_deadline() -> None:
    async def test(rig: Rig) -> None:
        with pytest.raises(TransportError, match="did not reach 7 within 2 s"):
            await rig.receiver.wait_applied(7, timeout_s=2)
        assert asyncio.get_running_loop().time() == pytest.approx(2.0)
        assert not rig.receiver._waiting

    run_rig(test)


def test_closing_ends_waiting_and_is_idempotent() -> None:
    async def test(rig: Rig) -> None:
        wait = asyncio.ensure_future(rig.receiver.wait_applied(7, timeout_s=2))
        await asyncio.sleep(0)
        rig.receiver.close()
        rig.receiver.close()
        with pytest.raises(TransportError, match="closed"):
            await wait
        with pytest.raises(TransportError, match="closed"):
            await rig.receiver.wait_applied(7, timeout_s=2)
        with pytest.raises(TransportError):
            await rig.sender.send_round([(0, 1)], 1, timeout_s=1)

    run_rig(test)


def test_closing_one_that_never_opened_leaves_another_s_transfer_alone() -> None:
    async def test(rig: Rig) -> None:
        KvReceiver(rig.destination_end, PAIR, rig.sink).close()
        await rig.sender.send_round([(0, 1)], 1, timeout_s=1)

    run_rig(test)


# ---- checksums ----


def test_checksum_sees_every_byte_and_no_slot_map() -> None:
    tokens = CHECKSUM_TOKENS + 5
    owned = Rectangle(1, 3, 0, tokens, 0, 1)
    rng = random.Random(4)
    content = rng.randbytes(2 * tokens * 2 * 1 * 2 * 4)
    ends = [MatrixKv(owned, 400, 2).request(rng.sample(range(400), tokens)) for _ in range(2)]
    for end in ends:
        end.write(0, content)
    checksum = rectangle_checksum(ends[0], owned)
    assert rectangle_checksum(ends[1], owned) == checksum
    assert rectangle_checksum(ends[0], Rectangle(1, 3, 0, tokens - 1, 0, 1)) != checksum
    for token in (0, CHECKSUM_TOKENS - 1, CHECKSUM_TOKENS, tokens - 1):
        cell = Rectangle(2, 3, token, token + 1, 0, 1)
        before = ends[1].gather(cell)
        ends[1].scatter(cell, bytes(byte ^ 1 for byte in before))
        assert rectangle_checksum(ends[1], owned) != checksum
        ends[1].scatter(cell, before)
    assert rectangle_checksum(ends[1], owned) == checksum
    assert rectangle_checksum(ends[0], Rectangle(1, 3, 4, 4, 0, 1)) == zlib.crc32(b"")


def test_matrix_refuses_slots_that_clash() -> None:
    kv = MatrixKv(PAIR.rectangle, 8, 4, np.float16)
    for slots in ([0, 0], [-1], [8]):
        with pytest.raises(ValueError, match="slots"):
            kv.request(slots)
    assert kv.whole().gather(Rectangle(0, 2, 0, 8, 0, 2)) == bytes(kv.array.nbytes)
