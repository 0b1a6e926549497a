"""Senders that are strangers, talk nonsense, stop halfway or flood, seen from a TcpTransport that receives:
no hang, no growth of memory."""

import asyncio
import random
import zlib
from contextlib import suppress
from dataclasses import replace

import pytest

from meshift.kv_memory.transport import frames
from tests.contract.transport_suite import Inbox, make_patch
from tests.unit.kv_memory.tcp_kit import (
    LIMITS,
    SOON_S,
    TIMEOUT_S,
    TOKEN,
    Raw,
    started,
    until,
)


async def test_a_busy_sender_does_not_keep_the_loop_to_itself() -> None:
    async with started() as receiver:
        inbox = Inbox()
        raw = Raw(receiver.open_transfer("move", inbox))
        await raw.send(b"".join(raw.head(make_patch(b"", watermark=w), w - 1) for w in range(1, 201)))
        # All of it is there; a task that does nothing but yield gets its turns in between.
        seen = set()
        async with asyncio.timeout(TIMEOUT_S):
            while len(inbox.patches) < 200:
                seen.add(len(inbox.patches))
                await asyncio.sleep(0)
        assert len(seen) > 100


async def test_garbage_is_dropped_and_others_go_on() -> None:
    rng = random.Random(3)
    async with started() as receiver, started() as sender:
        inbox = Inbox()
        address = receiver.open_transfer("move", inbox)
        raw = Raw(address)
        await raw.send(rng.randbytes(1000))
        assert await raw.dropped()
        await sender.send(address, make_patch(), timeout_s=TIMEOUT_S)
        assert inbox.watermarks == [1]


@pytest.mark.parametrize("what", ["wrong token", "unknown transfer", "old token"])
async def test_a_stranger_is_dropped_without_an_answer_or_a_buffer(what: str) -> None:
    async with started() as receiver:
        inbox = Inbox()
        address = receiver.open_transfer("move", inbox)
        if what == "wrong token":
            address = replace(address, token=TOKEN)
        if what == "old token":
            receiver.close_transfer("move")
            receiver.open_transfer("move", inbox)
        raw = Raw(address)
        name = "another" if what == "unknown transfer" else "move"
        await raw.send(raw.head(make_patch(bytes(1 << 20), transfer_id=name)))
        assert await raw.dropped()
        assert (receiver.buffered_bytes, inbox.patches) == (0, [])


async def test_a_silent_stranger_is_dropped_in_time() -> None:
    async with started(replace(LIMITS, stranger_timeout_s=SOON_S)) as receiver:
        address = receiver.open_transfer("move", Inbox())
        silent, slow = Raw(address), Raw(address)
        await slow.send(slow.head(make_patch())[:20])
        assert await silent.dropped()
        assert await slow.dropped()
        await until(lambda: receiver.connection_count == 0)


async def test_many_strangers_do_not_keep_a_sender_out() -> None:
    async with started(replace(LIMITS, strangers_max=4)) as receiver, started() as sender:
        inbox = Inbox()
        address = receiver.open_transfer("move", inbox)
        strangers = [Raw(address) for _ in range(40)]
        await until(lambda: receiver.connection_count == 4)
        await sender.send(address, make_patch(), timeout_s=TIMEOUT_S)
        assert receiver.connection_count <= 5
        assert inbox.watermarks == [1]
        del strangers


async def test_connections_are_bounded() -> None:
    async with started(replace(LIMITS, connections_max=2)) as receiver:
        inbox = Inbox()
        address = receiver.open_transfer("move", inbox)
        kept = [Raw(address), Raw(address)]
        for raw in kept:
            await raw.send(raw.head(make_patch(b"")))
            assert await raw.answer() == (True, "")
        assert await Raw(address).dropped()
        assert receiver.connection_count == 2


async def test_a_claim_of_more_than_the_limit_costs_nothing() -> None:
    async with started() as receiver:
        raw = Raw(receiver.open_transfer("move", Inbox()))
        head = bytearray(frames.PATCH_HEAD_BYTES)
        # As `pack_patch` would, without a payload of that size.
        patch = make_patch(b"")
        packed = raw.head(patch)
        head[:] = packed[: frames.PATCH_HEAD_BYTES]
        head[-16:-8] = (2**62).to_bytes(8, "big")
        head[-4:] = zlib.crc32(b"move", zlib.crc32(head[:-4])).to_bytes(4, "big")
        await raw.send(bytes(head) + b"move")
        applied, reason = await raw.answer()
        assert not applied
        assert f"{2**62} bytes" in reason
        assert receiver.buffered_bytes == 0


async def test_a_sender_that_stops_halfway_is_given_up() -> None:
    async with started(replace(LIMITS, stall_timeout_s=SOON_S)) as receiver:
        inbox = Inbox()
        raw = Raw(receiver.open_transfer("move", inbox))
        await raw.send(raw.head(make_patch(bytes(4 << 20))) + bytes(100_000))
        assert await raw.dropped()
        await until(lambda: receiver.connection_count == 0)
        assert (receiver.buffered_bytes, inbox.patches) == (0, [])


async def test_a_sender_that_leaves_halfway() -> None:
    async with started() as receiver:
        inbox = Inbox()
        raw = Raw(receiver.open_transfer("move", inbox))
        await raw.send(raw.head(make_patch(bytes(4 << 20))) + bytes(100_000))
        await until(lambda: receiver.buffered_bytes > 0)
        raw.socket.close()
        await until(lambda: receiver.connection_count == 0)
        assert (receiver.buffered_bytes, inbox.patches) == (0, [])


async def test_closing_a_transfer_ends_what_is_half_received() -> None:
    async with started() as receiver:
        inbox = Inbox()
        raw = Raw(receiver.open_transfer("move", inbox))
        await raw.send(raw.head(make_patch(bytes(8 << 20))) + bytes(100_000))
        await until(lambda: receiver.buffered_bytes > 0)
        receiver.close_transfer("move")
        # Far less than the payload, and yet the answer comes.
        await raw.send(bytes(3 << 20))
        assert await raw.answer() == (False, "transfer move is not open here")
        assert (receiver.buffered_bytes, inbox.patches) == (0, [])


async def test_arrivals_wait_for_memory_in_the_network() -> None:
    """Two payloads of the whole pool's size: the second is received when the first has been applied."""
    async with started() as receiver:
        inbox = Inbox()
        address = receiver.open_transfer("move", inbox)
        first, second = Raw(address), Raw(address)
        payload = bytes(8 << 20)
        await first.send(first.head(make_patch(payload)) + payload[:1000])
        await until(lambda: receiver.buffered_bytes > 0)
        waiting = asyncio.ensure_future(second.send(second.head(make_patch(payload, watermark=2)) + payload))
        await asyncio.sleep(SOON_S)
        assert receiver.buffered_bytes == 8 << 20
        assert not waiting.done()
        await first.send(payload[1000:])
        assert await first.answer() == (True, "")
        assert await second.answer() == (True, "")
        await waiting
        assert inbox.watermarks == [1, 2]


async def test_waiting_for_memory_has_a_deadline() -> None:
    async with started(replace(LIMITS, stall_timeout_s=4 * SOON_S)) as receiver:
        address = receiver.open_transfer("move", Inbox())
        first, second = Raw(address), Raw(address)
        await first.send(first.head(make_patch(bytes(8 << 20))) + bytes(1000))
        await until(lambda: receiver.buffered_bytes > 0)
        await second.send(second.head(make_patch(bytes(8 << 20))))
        assert await first.dropped()
        assert await second.dropped()
        await until(lambda: receiver.connection_count == 0)
        assert receiver.buffered_bytes == 0


async def test_a_flood_that_reads_no_answers_is_dropped() -> None:
    async with started(replace(LIMITS, stall_timeout_s=SOON_S)) as receiver:
        # A small buffer, so that its unread answers soon fill it.
        raw = Raw(receiver.open_transfer("move", Inbox()), receive_buffer_bytes=4096)
        frame = raw.head(make_patch(b""))
        with suppress(ConnectionError):
            async with asyncio.timeout(TIMEOUT_S):
                while True:
                    await raw.send(frame * 100)
        await until(lambda: receiver.connection_count == 0)


async def test_a_sender_that_goes_on_after_a_refusal_is_not_heard() -> None:
    async with started() as receiver:
        inbox = Inbox()
        raw = Raw(receiver.open_transfer("move", inbox))
        bad = replace(make_patch(b"abc"), checksum=0)
        good = make_patch(b"abc", watermark=2)
        await raw.send(raw.head(bad) + b"abc" + raw.head(good, 1) + b"abc")
        applied, reason = await raw.answer()
        assert not applied
        assert "checksum" in reason
        with pytest.raises(ConnectionError):
            await raw.answer()
        assert inbox.patches == []


async def test_close_drops_everybody() -> None:
    async with started() as receiver:
        address = receiver.open_transfer("move", Inbox())
        half, silent = Raw(address), Raw(address)
        await half.send(half.head(make_patch(bytes(4 << 20))) + bytes(1000))
        await until(lambda: receiver.buffered_bytes > 0)
        await receiver.close()
        assert await half.dropped()
        assert await silent.dropped()
        assert (receiver.connection_count, receiver.buffered_bytes) == (0, 0)
        with pytest.raises(OSError, match="refused"):
            Raw(address)
