"""Receivers that freeze, die or talk nonsense, seen from a TcpTransport that sends: an error by the
deadline."""

import asyncio
import random
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest

from meshift.kv_memory.transport import frames
from meshift.kv_memory.transport.base import Address, TransportError
from tests.contract.transport_suite import Inbox, make_patch
from tests.unit.kv_memory.tcp_kit import (
    LIMITS,
    SOON_S,
    TIMEOUT_S,
    TOKEN,
    Play,
    fails,
    freeze,
    peer_that,
    read_patch,
    started,
    until,
)


@pytest.mark.parametrize("size", [10, 8 << 20])
async def test_a_frozen_receiver_fails_by_the_deadline(size: int) -> None:
    async with peer_that(freeze) as address, started() as sender:
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        with pytest.raises(TransportError, match="no answer within"):
            await sender.send(address, make_patch(bytes(size)), timeout_s=SOON_S)
        assert loop.time() - start_s < TIMEOUT_S / 2
        assert "broken" in await fails(sender.send(address, make_patch(), timeout_s=TIMEOUT_S))


async def test_a_frozen_receiver_is_given_up_before_a_late_deadline() -> None:
    async with peer_that(freeze) as address, started(replace(LIMITS, stall_timeout_s=SOON_S)) as sender:
        assert "no progress" in await fails(sender.send(address, make_patch(bytes(8 << 20)), timeout_s=100 * TIMEOUT_S))


async def test_sends_that_wait_behind_a_frozen_receiver_fail_too() -> None:
    async with peer_that(freeze) as address, started() as sender:
        sends = [
            asyncio.ensure_future(sender.send(address, make_patch(bytes(4 << 20), watermark=w), timeout_s=SOON_S * w))
            for w in range(1, 6)
        ]
        results = await asyncio.wait_for(asyncio.gather(*sends, return_exceptions=True), TIMEOUT_S)
        assert all(isinstance(result, TransportError) for result in results)
        await until(lambda: sender.connection_count == 0)


async def test_a_frozen_receiver_does_not_hold_up_others() -> None:
    async with peer_that(freeze) as address, started() as sender, started() as other:
        inbox = Inbox()
        other_address = other.open_transfer("other", inbox)
        stuck = asyncio.ensure_future(sender.send(address, make_patch(bytes(8 << 20)), timeout_s=TIMEOUT_S))
        await asyncio.sleep(0)
        await sender.send(other_address, make_patch(bytes(8 << 20), transfer_id="other"), timeout_s=TIMEOUT_S)
        assert len(inbox.patches) == 1
        stuck.cancel()
        await asyncio.gather(stuck, return_exceptions=True)


async def test_nobody_listens() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = Address("tcp", f"127.0.0.1:{unused.getsockname()[1]}", 0, TOKEN)
        async with started() as sender:
            assert "can't reach" in await fails(sender.send(address, make_patch(), timeout_s=TIMEOUT_S))


@pytest.mark.parametrize("location", ["", "nowhere", "host:", ":80", "host:0", "host:99999", "host:²²"])
async def test_a_location_that_is_none(location: str) -> None:
    async with started() as sender:
        assert "host and a port" in await fails(
            sender.send(Address("tcp", location, 0, TOKEN), make_patch(), timeout_s=TIMEOUT_S)
        )


async def test_a_receiver_that_dies_in_the_middle() -> None:
    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(100_000)
        writer.transport.abort()

    async with peer_that(die) as address, started() as sender:
        await fails(sender.send(address, make_patch(bytes(8 << 20)), timeout_s=TIMEOUT_S))


async def test_a_receiver_that_dies_before_its_answer() -> None:
    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_patch(reader)

    async with peer_that(die) as address, started() as sender:
        assert "closed by the peer" in await fails(sender.send(address, make_patch(), timeout_s=TIMEOUT_S))


def answer_with(raw: Callable[[frames.PatchHead], bytes]) -> Play:
    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await read_patch(reader)
        writer.write(raw(head))
        await writer.drain()
        await reader.read()

    return play


@pytest.mark.parametrize(
    "raw",
    [
        lambda head: random.Random(8).randbytes(1000),
        lambda head: frames.pack_answer(head.sequence + 1, None),
        lambda head: frames.pack_answer(head.sequence, None) * 2 + b"x" * 100,
        lambda head: b"HTTP/1.1 400 Bad Request\r\n\r\n",
    ],
    ids=["random", "another patch", "two answers", "another protocol"],
)
async def test_answers_that_make_no_sense_end_the_connection(raw: Callable[[frames.PatchHead], bytes]) -> None:
    async with peer_that(answer_with(raw)) as address, started() as sender:
        with suppress(TransportError):
            await asyncio.wait_for(sender.send(address, make_patch(), timeout_s=TIMEOUT_S), TIMEOUT_S)
        await until(lambda: sender.connection_count == 0)


async def test_half_an_answer() -> None:
    half = answer_with(lambda head: frames.pack_answer(head.sequence, "because")[:-3])
    async with peer_that(half) as address, started(replace(LIMITS, stall_timeout_s=SOON_S)) as sender:
        assert "no progress" in await fails(sender.send(address, make_patch(), timeout_s=TIMEOUT_S))


async def test_a_refusal_without_a_reason() -> None:
    silent = answer_with(lambda head: frames.pack_answer(head.sequence, ""))
    async with peer_that(silent) as address, started() as sender:
        assert await fails(sender.send(address, make_patch(), timeout_s=TIMEOUT_S)) == "refused"


async def test_a_payload_over_the_limit_is_not_sent() -> None:
    async with started() as sender, started() as receiver:
        address = receiver.open_transfer("move", Inbox())
        assert "larger" in await fails(sender.send(address, make_patch(bytes((8 << 20) + 1)), timeout_s=TIMEOUT_S))
