"""NixlTransport and peers that freeze, die, talk nonsense or flood, over a network in NIXL's place."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from meshift.kv_memory.staging import StagingPool
from meshift.kv_memory.transport import frames
from meshift.kv_memory.transport.base import Address, Patch, TransportError
from meshift.kv_memory.transport.limits import TransportLimits
from meshift.kv_memory.transport.nixl import NixlTransport
from meshift.kv_memory.transport.nixl_link import location_of
from meshift.kv_memory.transport.nixl_receiver import PATCHES_MAX, pack_announcement
from tests.contract.transport_suite import Inbox, make_patch
from tests.unit.kv_memory.fake_nixl import FakeAgent, FakeNixl

TIMEOUT_S = 10.0
SOON_S = 0.05
MIB = 1 << 20
LIMITS = TransportLimits(patch_bytes_max=MIB, in_flight_bytes_max=4 * MIB, receive_bytes_max=4 * MIB)


class World:
    """Two ends, and a third agent that can say anything."""

    def __init__(self, limits: TransportLimits) -> None:
        self.network = FakeNixl()
        self.sender, self.receiver = self.make(limits), self.make(limits)

    def make(self, limits: TransportLimits = LIMITS, staging: StagingPool | None = None) -> NixlTransport:
        return NixlTransport(limits=limits, staging=staging, make_agent=self.network.make_agent)

    async def __aenter__(self) -> "World":
        await self.sender.start()
        await self.receiver.start()
        self.sender_name, self.receiver_name = self.network.agents
        self.stranger = self.network.make_agent("stranger", [])
        self.stranger.add_peer(self.receiver_name.encode())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.sender.close()
        await self.receiver.close()
        self.stranger.close()

    def say(self, message: bytes) -> None:
        self.stranger.notify(self.receiver_name, message)

    def announce(self, address: Address, patch: Patch, source_address: int = 0) -> bytes:
        head = frames.pack_patch(patch, address.token, 7)
        return b"P" + pack_announcement(head, source_address, b"stranger")

    async def polled(self) -> None:
        """The receiver has looked a few times."""
        agent = self.network.agents[self.receiver_name]
        polls = agent.polls
        await until(lambda: agent.polls >= polls + 5)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.001)


async def fails(send: Awaitable[None]) -> str:
    with pytest.raises(TransportError) as caught:
        await asyncio.wait_for(send, TIMEOUT_S)
    return str(caught.value)


async def test_a_frozen_receiver_fails_by_the_deadline() -> None:
    async with World(LIMITS) as world:
        deaf = world.network.make_agent("deaf", [])
        address = Address("nixl", location_of(deaf.metadata), 0, "ab" * frames.TOKEN_BYTES)
        assert "no answer within" in await fails(world.sender.send(address, make_patch(), timeout_s=SOON_S))
        assert "broken" in await fails(world.sender.send(address, make_patch(), timeout_s=TIMEOUT_S))


async def test_a_receiver_that_dies_is_noticed_before_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshift.kv_memory.transport.nixl_sender.PING_S", SOON_S)
    async with World(LIMITS) as world:
        deaf = world.network.make_agent("deaf", [])
        address = Address("nixl", location_of(deaf.metadata), 0, "ab" * frames.TOKEN_BYTES)
        send = asyncio.ensure_future(world.sender.send(address, make_patch(), timeout_s=TIMEOUT_S))
        await until(lambda: bool(deaf.inbox))
        deaf.close()
        assert "gone" in await fails(send)


async def test_a_sender_that_freezes_keeps_the_buffer_until_its_read_has_ended() -> None:
    async with World(replace(LIMITS, stall_timeout_s=SOON_S)) as world:
        inbox = Inbox()
        address = world.receiver.open_transfer("move", inbox)
        world.network.frozen.add(world.sender_name)
        assert "no progress" in await fails(world.sender.send(address, make_patch(bytes(MIB)), timeout_s=TIMEOUT_S))
        await world.polled()
        assert world.receiver.buffered_bytes == MIB
        world.network.frozen.clear()
        await until(lambda: world.receiver.buffered_bytes == 0)
        assert (inbox.patches, world.network.unsettled) == ([], 0)


async def test_a_sender_that_dies_while_it_is_read() -> None:
    async with World(LIMITS) as world:
        inbox = Inbox()
        address = world.receiver.open_transfer("move", inbox)
        world.network.frozen.add(world.sender_name)
        send = asyncio.ensure_future(world.sender.send(address, make_patch(bytes(MIB)), timeout_s=TIMEOUT_S))
        await until(lambda: world.network.reads == 1)
        await world.sender.close()
        assert "closed" in await fails(send)
        await until(lambda: world.receiver.buffered_bytes == 0)
        assert inbox.patches == []


async def test_memory_that_a_late_receiver_reads_is_refused() -> None:
    """The sender gives up, and its buffer is used for something else before the receiver comes to read."""
    async with World(LIMITS) as world:
        inbox = Inbox()
        address = world.receiver.open_transfer("move", inbox)
        world.network.frozen.add(world.sender_name)
        await fails(world.sender.send(address, make_patch(b"a" * 1000), timeout_s=SOON_S))
        other = world.receiver.open_transfer("other", Inbox())
        late = asyncio.ensure_future(
            world.sender.send(other, make_patch(b"b" * 1000, transfer_id="other"), timeout_s=TIMEOUT_S)
        )
        await until(lambda: world.network.reads == 2)
        world.network.frozen.clear()
        await late
        await until(lambda: world.network.unsettled == 0)
        await world.polled()
        assert inbox.patches == []


async def test_strangers_and_garbage_cost_nothing() -> None:
    rng = random.Random(9)
    async with World(LIMITS) as world:
        inbox = Inbox()
        address = world.receiver.open_transfer("move", inbox)
        good = world.announce(address, make_patch(bytes(1000)))
        forged = replace(address, token="cd" * frames.TOKEN_BYTES)
        world.say(world.announce(forged, make_patch(bytes(1000))))
        for length in range(len(good)):
            world.say(good[:length])
        for _ in range(200):
            spoiled = bytearray(good)
            spoiled[rng.randrange(len(good) - 10)] ^= 1 << rng.randrange(8)
            if spoiled[: frames.PATCH_HEAD_BYTES + 5] != good[: frames.PATCH_HEAD_BYTES + 5]:
                world.say(bytes(spoiled))
            world.say(rng.randbytes(rng.randrange(300)))
            world.say(b"A" + rng.randbytes(rng.randrange(40)))
        await world.polled()
        assert (world.network.reads, world.receiver.buffered_bytes, inbox.patches) == (0, 0, [])
        assert not world.stranger.inbox, "no answer"
        await world.sender.send(address, make_patch(), timeout_s=TIMEOUT_S)
        assert inbox.watermarks == [1]


async def answer_to(agent: FakeAgent) -> str:
    await until(lambda: bool(agent.inbox))
    message = agent.inbox.popleft()
    assert message[:1] == b"A"
    head = frames.unpack_answer_head(message[1:][: frames.ANSWER_HEAD_BYTES])
    assert not head.applied
    return message[1 + frames.ANSWER_HEAD_BYTES :].decode()


async def test_memory_that_the_sender_has_not_registered() -> None:
    async with World(LIMITS) as world:
        address = world.receiver.open_transfer("move", Inbox())
        world.say(world.announce(address, make_patch(b"abc"), source_address=1))
        assert "not registered" in await answer_to(world.stranger)
        assert world.receiver.buffered_bytes == 0


async def test_a_claim_of_more_than_the_limit_costs_nothing() -> None:
    async with World(replace(LIMITS, patch_bytes_max=100)) as world:
        address = world.receiver.open_transfer("move", Inbox())
        world.say(world.announce(address, make_patch(bytes(101))))
        assert "101 bytes" in await answer_to(world.stranger)
        assert world.network.reads == 0
        assert "larger" in await fails(world.sender.send(address, make_patch(bytes(101)), timeout_s=TIMEOUT_S))


async def test_a_flood_is_bounded() -> None:
    async with World(replace(LIMITS, stall_timeout_s=SOON_S)) as world:
        world.network.frozen.add("stranger")
        address = world.receiver.open_transfer("move", Inbox())
        for _ in range(PATCHES_MAX + 50):
            world.say(world.announce(address, make_patch(bytes(MIB))))
        await until(lambda: len(world.stranger.inbox) == PATCHES_MAX + 50)
        assert world.receiver.buffered_bytes <= LIMITS.receive_bytes_max
        reasons = [await answer_to(world.stranger) for _ in range(PATCHES_MAX + 50)]
        assert sum("under way" in reason for reason in reasons) == 50
        assert sum("no progress" in reason for reason in reasons) == PATCHES_MAX


async def test_close_tells_the_senders() -> None:
    async with World(LIMITS) as world:
        address = world.receiver.open_transfer("move", Inbox())
        world.network.frozen.add(world.sender_name)
        send = asyncio.ensure_future(world.sender.send(address, make_patch(bytes(MIB)), timeout_s=TIMEOUT_S))
        await until(lambda: world.network.reads == 1)
        await world.receiver.close()
        assert await fails(send) == "closed"


async def test_staged_payloads_are_sent_from_where_they_are() -> None:
    async with World(LIMITS) as world, AsyncExitStack() as stack:
        pool = StagingPool(MIB)
        sender = world.make(staging=pool)
        await sender.start()
        stack.push_async_callback(sender.close)
        inbox = Inbox()
        address = world.receiver.open_transfer("move", inbox)
        buffer = pool.try_acquire(MIB)
        assert buffer is not None
        buffer.view[:] = b"s" * MIB
        await sender.send(address, make_patch(buffer.view), timeout_s=TIMEOUT_S)
        assert inbox.patches[0].payload == b"s" * MIB


async def test_a_copy_waits_for_room_in_a_shared_pool() -> None:
    async with World(LIMITS) as world, AsyncExitStack() as stack:
        pool = StagingPool(MIB)
        sender = world.make(staging=pool)
        await sender.start()
        stack.push_async_callback(sender.close)
        inbox = Inbox()
        address = world.receiver.open_transfer("move", inbox)
        buffer = pool.try_acquire(MIB)
        assert buffer is not None
        send = asyncio.ensure_future(sender.send(address, make_patch(b"elsewhere"), timeout_s=TIMEOUT_S))
        await world.polled()
        assert not send.done()
        buffer.release()
        await send
        assert inbox.patches[0].payload == b"elsewhere"


async def test_polling_has_one_pace_and_is_seldom_while_idle() -> None:
    async with World(LIMITS) as world:
        address = world.receiver.open_transfer("move", Inbox())
        for watermark in range(1, 50):
            await world.sender.send(address, make_patch(watermark=watermark), timeout_s=TIMEOUT_S)
        world.receiver.close_transfer("move")
        # What was scheduled for a busy time is over soon.
        await asyncio.sleep(SOON_S)
        agent = world.network.agents[world.receiver_name]
        polls = agent.polls
        await asyncio.sleep(SOON_S)
        assert agent.polls - polls <= 5


@pytest.mark.parametrize("location", ["", "not base64!", "ä"])
async def test_a_location_that_is_none(location: str) -> None:
    async with World(LIMITS) as world:
        address = Address("nixl", location, 0, "ab" * frames.TOKEN_BYTES)
        assert "address" in await fails(world.sender.send(address, make_patch(), timeout_s=TIMEOUT_S))


async def test_without_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "nixl._api", None)
    end = NixlTransport(limits=LIMITS)
    with pytest.raises(TransportError, match="isn't there"):
        await end.start()
    await end.close()


async def test_polling_goes_on_after_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = [TransportError("no memory")]
    messages = FakeAgent.messages

    def failing(agent: FakeAgent) -> list[bytes]:
        if failures:
            raise failures.pop()
        return messages(agent)

    monkeypatch.setattr(FakeAgent, "messages", failing)
    async with World(LIMITS) as world:
        inbox = Inbox()
        await world.sender.send(world.receiver.open_transfer("move", inbox), make_patch(), timeout_s=TIMEOUT_S)
        assert inbox.watermarks == [1]
    assert "no memory" in caplog.text


async def test_peers_are_forgotten_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshift.kv_memory.transport.nixl_link.PEERS_MAX", 2)
    async with World(LIMITS) as world:
        for name in ("one", "two", "three"):
            end = world.make()
            await end.start()
            inbox = Inbox()
            await world.sender.send(end.open_transfer(name, inbox), make_patch(transfer_id=name), timeout_s=TIMEOUT_S)
            assert inbox.watermarks == [1]
            await end.close()
        assert len(world.network.agents[world.sender_name].peers) == 2
