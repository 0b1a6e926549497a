"""DistributedTransport when inference is in the way, ends give up in every phase, and peers die or talk nonsense; over
a library in torch.distributed's place."""

import asyncio
import struct
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from meshift.kv_memory.transport.base import Address, TransportError
from meshift.kv_memory.transport.distributed import DistributedTransport, Gate, HandshakeLimits
from meshift.kv_memory.transport.distributed.link import BODY_BYTES_MAX
from meshift.kv_memory.transport.distributed.receiving import Receiving
from meshift.kv_memory.transport.distributed.sending import Sending
from meshift.kv_memory.transport.distributed.table import ReceiverState, SenderState
from meshift.kv_memory.transport.limits import TransportLimits
from tests.contract.transport_suite import Inbox, make_patch
from tests.unit.kv_memory.fake_library import FakeNetwork

TIMEOUT_S = 10.0
SOON_S = 0.2
PIECE_BYTES = 1000
PAYLOAD = bytes(range(250)) * 10
"""Three pieces."""

LIMITS = TransportLimits(patch_bytes_max=1 << 20, receive_bytes_max=1 << 20, stranger_timeout_s=SOON_S)
HANDSHAKE = HandshakeLimits(piece_bytes=PIECE_BYTES, answer_timeout_s=TIMEOUT_S, crossing_timeout_s=TIMEOUT_S)

_S, _R = SenderState, ReceiverState


class Pair:
    """A sender and a receiver, whose addresses are in the order that is asked for."""

    def __init__(
        self, network: FakeNetwork, one: DistributedTransport, other: DistributedTransport, first: str
    ) -> None:
        self.network = network
        low, high = sorted((one, other), key=lambda end: end.location)
        self.sender, self.receiver = (low, high) if first == "sender" else (high, low)

    def sending(self) -> Sending:
        """The exchange, at its sender."""
        ((_, exchange),) = self.sender._sender._exchanges.values()
        return exchange

    def receiving(self) -> Receiving:
        (arrival,) = self.receiver._receiver._arrivals.values()
        return arrival.exchange

    async def until_sending(self, state: SenderState) -> None:
        await until(lambda: bool(self.sender._sender._exchanges) and self.sending().state is state)

    async def until_crossing(self) -> None:
        """A piece is in the library, and is held there."""
        await self.until_sending(_S.INSIDE)
        for end in (self.sender, self.receiver):
            slots = end._access.groups._slots
            await until(lambda slots=slots: any(slot.group is not None for slot in slots.values()))  # type: ignore[misc]

    async def until_receiving(self, state: ReceiverState) -> None:
        await until(lambda: bool(self.receiver._receiver._arrivals) and self.receiving().state is state)

    async def check_free(self) -> None:
        """Neither end has anything left of any exchange."""
        for end in (self.sender, self.receiver):
            await until(lambda end=end: not end._receiver._arrivals and not end._sender._exchanges)  # type: ignore[misc]
            await until(lambda end=end: end._access.claims.holder is None)  # type: ignore[misc]
            assert not end.gate.locked
            assert not end.gate._watcher
            assert not end.buffered_bytes

    async def check_works(self) -> None:
        """Another transfer goes through, without hurry."""
        self.network.release()
        for end in (self.sender, self.receiver):
            end._sender._handshake = end._receiver._handshake = HANDSHAKE
            end._sender._limits = end._receiver._limits = LIMITS
        inbox = Inbox()
        address = self.receiver.open_transfer("another", inbox)
        await self.sender.send(address, make_patch(PAYLOAD, transfer_id="another"), timeout_s=TIMEOUT_S)
        assert inbox.patches[0].payload == PAYLOAD

    def send(self, address: Address, timeout_s: float = TIMEOUT_S) -> "asyncio.Task[None]":
        return asyncio.ensure_future(self.sender.send(address, make_patch(PAYLOAD), timeout_s=timeout_s))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.001)


@asynccontextmanager
async def running(
    first: str = "sender", *, limits: TransportLimits = LIMITS, handshake: HandshakeLimits = HANDSHAKE
) -> AsyncIterator[Pair]:
    network = FakeNetwork()
    ends = [
        DistributedTransport(rank=rank, limits=limits, handshake=handshake, make_library=network.make_library)
        for rank in range(2)
    ]
    for end in ends:
        await end.start()
    yield Pair(network, ends[0], ends[1], first)
    network.release()
    for end in ends:
        await end.close()


@pytest.fixture(params=["sender", "receiver"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    """Whose address is the lower one, so that its claim comes first."""
    async with running(request.param) as pair:
        yield pair


# ---- inference in the way ----


async def test_a_busy_receiver_sends_the_sender_back_and_calls_it(pair: Pair) -> None:
    inbox = Inbox()
    sending = pair.send(pair.receiver.open_transfer("move", inbox))
    pair.receiver.gate.enter()
    await pair.until_sending(_S.HELD_OFF)
    assert not pair.sender.gate.locked
    pair.receiver.gate.leave()
    await sending
    assert inbox.patches[0].payload == PAYLOAD
    assert pair.sender.held_off >= 1
    await pair.check_free()


async def test_a_sender_waits_for_its_own_inference_and_locks_nobody(pair: Pair) -> None:
    sending = pair.send(pair.receiver.open_transfer("move", Inbox()))
    pair.sender.gate.enter()
    await pair.until_sending(_S.LOCKING)
    await pair.until_receiving(_R.READY)
    assert pair.receiver.gate.try_lock()
    pair.receiver.gate.unlock()
    pair.sender.gate.leave()
    await sending
    await pair.check_free()


async def test_inference_passes_between_two_pieces(pair: Pair) -> None:
    pair.network.hold_new = True
    sending = pair.send(pair.receiver.open_transfer("move", Inbox()))
    await pair.until_crossing()
    passed, leave = threading.Event(), threading.Event()

    def infer() -> None:
        with pair.sender.gate.inference(timeout_s=TIMEOUT_S):
            passed.set()
            leave.wait(TIMEOUT_S)

    thread = threading.Thread(target=infer)
    thread.start()
    await until(lambda: pair.sender.gate._waiting == 1)
    assert not passed.is_set()
    pair.network.release()
    await until(passed.is_set)
    await pair.until_sending(_S.LOCKING)
    leave.set()
    await sending
    thread.join(TIMEOUT_S)
    await pair.check_free()


async def test_a_receiver_gives_up_a_sender_that_is_always_busy() -> None:
    async with running(limits=replace(LIMITS, stall_timeout_s=SOON_S)) as pair:
        pair.sender.gate.enter()
        with pytest.raises(TransportError, match="makes no progress"):
            await pair.send(pair.receiver.open_transfer("move", Inbox()))
        pair.sender.gate.leave()
        await pair.check_free()
        await pair.check_works()


# ---- giving up, phase by phase ----


async def stay(pair: Pair, state: SenderState, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Have exchanges stay in that state; how to end that."""
    access = (pair.sender if state in (_S.CLAIMING, _S.JOINING) else pair.receiver)._access
    if state in (_S.CLAIMING, _S.JOINING, _S.OFFERED, _S.PROPOSED):
        access.claims.take("somebody", lambda: None)
        return lambda: access.claims.give_back("somebody")
    if state is _S.LOCKING:
        pair.sender.gate.enter()
        return pair.sender.gate.leave
    if state is _S.HELD_OFF:
        pair.receiver.gate.enter()
        return pair.receiver.gate.leave
    if state is _S.INSIDE:
        pair.network.hold_new = True
        return pair.network.release
    deaf = {_S.ENTERING: "_enter", _S.CROSSED: "_apply"}[state]
    patch.setattr(pair.receiver._receiver, deaf, lambda *arguments: None)
    return patch.undo


PHASES = [
    ("sender", _S.CLAIMING),
    ("sender", _S.OFFERED),
    ("receiver", _S.PROPOSED),
    ("receiver", _S.JOINING),
    ("sender", _S.LOCKING),
    ("sender", _S.ENTERING),
    ("sender", _S.HELD_OFF),
    ("receiver", _S.INSIDE),
    ("sender", _S.CROSSED),
]


@pytest.mark.parametrize(("first", "state"), PHASES)
async def test_a_sender_gives_up(first: str, state: SenderState, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(first) as pair:
        end_stay = await stay(pair, state, monkeypatch)
        address = pair.receiver.open_transfer("move", Inbox())
        sending = pair.send(address)
        await pair.until_crossing() if state is _S.INSIDE else await pair.until_sending(state)
        sending.cancel()
        if state is _S.INSIDE:
            # The payload is being read: not before that is over.
            await pair.until_sending(_S.LEAVING)
            assert not sending.done()
            end_stay()
        with pytest.raises(asyncio.CancelledError):
            await sending
        end_stay() if state is not _S.INSIDE else None
        await pair.check_free()
        with pytest.raises(TransportError, match="broken"):
            await pair.send(address)
        await pair.check_works()


@pytest.mark.parametrize(("first", "state"), PHASES)
async def test_a_receiver_closes(first: str, state: SenderState, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(first) as pair:
        end_stay = await stay(pair, state, monkeypatch)
        sending = pair.send(pair.receiver.open_transfer("move", Inbox()))
        await pair.until_crossing() if state is _S.INSIDE else await pair.until_sending(state)
        closing = asyncio.ensure_future(pair.receiver.close())
        if state in (_S.INSIDE, _S.CLAIMING):
            await asyncio.sleep(0)
            end_stay()
        await closing
        with pytest.raises(TransportError):
            await sending
        end_stay() if state not in (_S.INSIDE, _S.CLAIMING) else None
        await pair.check_free()


@pytest.mark.parametrize(("first", "state"), PHASES)
async def test_the_link_is_lost(first: str, state: SenderState, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(first) as pair:
        end_stay = await stay(pair, state, monkeypatch)
        sending = pair.send(pair.receiver.open_transfer("move", Inbox()))
        await pair.until_crossing() if state is _S.INSIDE else await pair.until_sending(state)
        (making,) = pair.sender._sender._links.values()
        making.result()._writer.transport.abort()
        if state is _S.INSIDE:
            await pair.until_sending(_S.LEAVING)
            end_stay()
        with pytest.raises(TransportError):
            await sending
        end_stay() if state is not _S.INSIDE else None
        monkeypatch.undo()
        await pair.check_free()
        await pair.check_works()


async def test_a_closed_transfer_is_left_between_two_pieces(pair: Pair) -> None:
    pair.network.hold_new = True
    inbox = Inbox()
    sending = pair.send(pair.receiver.open_transfer("move", inbox))
    await pair.until_crossing()
    pair.receiver.close_transfer("move")
    pair.network.release()
    with pytest.raises(TransportError, match="not open here"):
        await sending
    assert not inbox.patches
    await pair.check_free()
    await pair.check_works()


async def test_a_receiver_that_says_nothing_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(handshake=replace(HANDSHAKE, answer_timeout_s=SOON_S)) as pair:
        await stay(pair, _S.ENTERING, monkeypatch)
        with pytest.raises(TransportError, match="whether to enter"):
            await pair.send(pair.receiver.open_transfer("move", Inbox()))
        monkeypatch.undo()
        await pair.check_free()
        await pair.check_works()


# ---- the library ----


async def test_what_crosses_has_a_deadline() -> None:
    async with running(handshake=replace(HANDSHAKE, crossing_timeout_s=SOON_S)) as pair:
        pair.network.hold_new = True
        with pytest.raises(TransportError, match=r"nothing crossed|dropped"):
            await pair.send(pair.receiver.open_transfer("move", Inbox()))
        await pair.check_free()
        await pair.check_works()


async def test_a_library_that_opens_no_group(pair: Pair) -> None:
    pair.network.refuse = "no such device"
    with pytest.raises(TransportError, match="no such device"):
        await pair.send(pair.receiver.open_transfer("move", Inbox()))
    await pair.check_free()
    pair.network.refuse = ""
    await pair.check_works()


async def test_a_group_is_used_again_until_something_fails(pair: Pair) -> None:
    await pair.check_works()
    pair.receiver.close_transfer("another")
    await pair.check_works()
    assert len(pair.network.channels) == 1
    pair.network.channels[b"0"].change(held=True)
    address = pair.receiver.open_transfer("move", Inbox())
    sending = pair.send(address)
    await pair.until_crossing()
    sending.cancel()
    await pair.until_sending(_S.LEAVING)
    pair.network.release()
    await asyncio.wait([sending])
    pair.receiver.close_transfer("another")
    await pair.check_works()
    assert len(pair.network.channels) == 2


async def test_a_patch_without_bytes_needs_no_library(pair: Pair) -> None:
    inbox = Inbox()
    address = pair.receiver.open_transfer("move", inbox)
    pair.sender.gate.enter()
    pair.receiver.gate.enter()
    await pair.sender.send(address, make_patch(b""), timeout_s=TIMEOUT_S)
    assert inbox.patches[0].payload == b""
    assert not pair.network.channels
    pair.sender.gate.leave()
    pair.receiver.gate.leave()


# ---- peers ----


async def test_a_rank_does_not_send_to_itself(pair: Pair) -> None:
    address = pair.sender.open_transfer("move", Inbox())
    with pytest.raises(TransportError, match="itself"):
        await pair.send(address)


GARBAGE = {
    "another protocol": b"GET / HTTP/1.1\r\n\r\n" * 2,
    "a long message": struct.pack("!BQI", 1, 0, BODY_BYTES_MAX + 1),
    "no such kind": struct.pack("!BQI", 99, 0, 0),
    "a receiver's word": struct.pack("!BQI", 4, 0, 0),
    "half an announcement": struct.pack("!BQI", 1, 0, 3) + b"abc",
    "an announcement of lies": struct.pack("!BQI", 1, 0, 8) + struct.pack("!IHH", 1, 60_000, 60_000),
    "nothing": b"",
    "half a head": b"\x01\x00",
}


@pytest.mark.parametrize("name", GARBAGE)
async def test_garbage_ends_its_link_and_nothing_else(name: str) -> None:
    async with running() as pair:
        host, _, port = pair.receiver.location.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(GARBAGE[name])
        async with asyncio.timeout(TIMEOUT_S):
            assert await reader.read() == b""
        writer.close()
        await pair.check_works()


async def test_strangers_are_few() -> None:
    limits = replace(LIMITS, strangers_max=2, stranger_timeout_s=TIMEOUT_S)
    async with running(limits=limits) as pair:
        host, _, port = pair.receiver.location.rpartition(":")
        connections = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
        async with asyncio.timeout(TIMEOUT_S):
            assert await connections[0][0].read() == b""
        assert pair.receiver._receiver.link_count == 2
        for _, writer in connections:
            writer.close()


async def test_a_patch_that_is_too_large_for_the_receiver() -> None:
    async with running() as pair:
        pair.receiver._receiver._limits = replace(LIMITS, patch_bytes_max=10)
        with pytest.raises(TransportError, match="10 are allowed"):
            await pair.send(pair.receiver.open_transfer("move", Inbox()))
        await pair.check_free()


async def test_no_memory_in_time() -> None:
    async with running(limits=replace(LIMITS, stall_timeout_s=SOON_S)) as pair:
        buffer = pair.receiver._receiver.pool.try_acquire(1 << 20)
        assert buffer is not None
        with pytest.raises(TransportError, match="no memory"):
            await pair.send(pair.receiver.open_transfer("move", Inbox()))
        buffer.release()
        await pair.check_free()
        await pair.check_works()


def test_a_wildcard_is_refused() -> None:
    with pytest.raises(ValueError, match="reach"):
        DistributedTransport("0.0.0.0", gate=Gate())


def test_pieces_have_bytes() -> None:
    with pytest.raises(ValueError, match="pieces"):
        HandshakeLimits(piece_bytes=0)
