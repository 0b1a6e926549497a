"""What every transport must do. A test class inherits `TransportSuite` and gives it fixtures."""

import asyncio
import random
import zlib
from collections.abc import Callable
from dataclasses import replace

import pytest

from meshift.kv_memory.rectangle import Rectangle
from meshift.kv_memory.transport.base import Address, Patch, Transport, TransportError

TIMEOUT_S = 10.0
SEED = 20

Ends = tuple[Transport, Transport]


def make_patch(payload: bytes | memoryview = b"some bytes", *, transfer_id: str = "move", watermark: int = 1) -> Patch:
    """A patch whose checksum is right."""
    rectangle = Rectangle(0, 2, 0, watermark, 0, 1)
    return Patch(transfer_id, watermark, 0, rectangle, payload, zlib.crc32(payload))


class Inbox:
    """A handler that keeps what it gets; the payload as a copy, since a transport may reuse its buffer."""

    def __init__(self) -> None:
        self.patches: list[Patch] = []

    def __call__(self, patch: Patch) -> None:
        self.patches.append(replace(patch, payload=bytes(patch.payload)))

    @property
    def watermarks(self) -> list[int]:
        return [patch.watermark for patch in self.patches]


class TransportSuite:
    """Inherit, and provide two fixtures: `ends`, a started sender and a started receiver that reach each
    other and are closed afterwards; `fresh_end`, which makes a further transport on the same network, not
    started."""

    # ---- delivery ----

    async def test_applied_when_send_returns(self, ends: Ends) -> None:
        sender, receiver = ends
        inbox = Inbox()
        address = receiver.open_transfer("move", inbox)
        sent = make_patch()
        await sender.send(address, sent, timeout_s=TIMEOUT_S)
        assert inbox.patches == [sent]

    @pytest.mark.parametrize("size", [0, 1, 4096, (1 << 20) + 7, 12 << 20])
    async def test_payload_is_byte_identical(self, ends: Ends, size: int) -> None:
        sender, receiver = ends
        inbox = Inbox()
        address = receiver.open_transfer("move", inbox)
        payload = random.Random(SEED).randbytes(size)
        await sender.send(address, make_patch(payload), timeout_s=TIMEOUT_S)
        assert inbox.patches[0].payload == payload

    async def test_payload_may_be_a_memoryview(self, ends: Ends) -> None:
        sender, receiver = ends
        inbox = Inbox()
        address = receiver.open_transfer("move", inbox)
        staging = memoryview(bytearray(range(200)))
        await sender.send(address, make_patch(staging[50:150]), timeout_s=TIMEOUT_S)
        assert inbox.patches[0].payload == bytes(range(50, 150))

    async def test_every_field_arrives(self, ends: Ends) -> None:
        sender, receiver = ends
        inbox = Inbox()
        address = receiver.open_transfer("a/b 1->2", inbox)
        sent = Patch("a/b 1->2", 2**40, 17, Rectangle(3, 9, 1024, 2**33, 2, 5), b"xyz", zlib.crc32(b"xyz"))
        await sender.send(address, sent, timeout_s=TIMEOUT_S)
        assert inbox.patches == [sent]

    async def test_order_of_calls_is_order_of_application(self, ends: Ends) -> None:
        sender, receiver = ends
        inbox = Inbox()
        address = receiver.open_transfer("move", inbox)
        rng = random.Random(SEED)
        patches = [make_patch(rng.randbytes(rng.choice((3, 70_000))), watermark=w) for w in range(1, 33)]
        await asyncio.gather(*(sender.send(address, p, timeout_s=TIMEOUT_S) for p in patches))
        assert inbox.patches == patches

    async def test_transfers_side_by_side(self, ends: Ends) -> None:
        sender, receiver = ends
        inboxes = {f"move-{i}": Inbox() for i in range(8)}
        addresses = {name: receiver.open_transfer(name, inbox) for name, inbox in inboxes.items()}
        await asyncio.gather(
            *(
                sender.send(
                    addresses[name],
                    make_patch(name.encode() * w, transfer_id=name, watermark=w),
                    timeout_s=TIMEOUT_S,
                )
                for w in range(1, 5)
                for name in inboxes
            )
        )
        for name, inbox in inboxes.items():
            assert inbox.watermarks == [1, 2, 3, 4]
            assert {patch.transfer_id for patch in inbox.patches} == {name}

    async def test_both_directions_at_once(self, ends: Ends) -> None:
        one, other = ends
        at_one, at_other = Inbox(), Inbox()
        to_one, to_other = one.open_transfer("up", at_one), other.open_transfer("down", at_other)
        await asyncio.gather(
            one.send(to_other, make_patch(b"d" * 300_000, transfer_id="down"), timeout_s=TIMEOUT_S),
            other.send(to_one, make_patch(b"u" * 300_000, transfer_id="up"), timeout_s=TIMEOUT_S),
        )
        assert (len(at_one.patches), len(at_other.patches)) == (1, 1)

    async def test_several_senders_of_one_transfer(self, ends: Ends, fresh_end: Callable[[], Transport]) -> None:
        sender, receiver = ends
        second = fresh_end()
        await second.start()
        try:
            inbox = Inbox()
            address = receiver.open_transfer("move", inbox)
            await sender.send(address, make_patch(watermark=1), timeout_s=TIMEOUT_S)
            await second.send(address, make_patch(watermark=2), timeout_s=TIMEOUT_S)
            assert inbox.watermarks == [1, 2]
        finally:
            await second.close()

    # ---- refusals ----

    async def refused(self, sender: Transport, address: Address, patch: Patch) -> str:
        with pytest.raises(TransportError) as caught:
            await sender.send(address, patch, timeout_s=TIMEOUT_S)
        return str(caught.value)

    async def test_wrong_checksum_is_refused(self, ends: Ends) -> None:
        sender, receiver = ends
        inbox = Inbox()
        address = receiver.open_transfer("move", inbox)
        patch = make_patch()
        assert "checksum" in await self.refused(sender, address, replace(patch, checksum=patch.checksum ^ 1))
        assert inbox.patches == []

    async def test_wrong_token_is_refused(self, ends: Ends) -> None:
        sender, receiver = ends
        inbox = Inbox()
        address = receiver.open_transfer("move", inbox)
        assert address.token
        await self.refused(sender, replace(address, token=address.token[::-1] + "0"), make_patch())
        await self.refused(sender, replace(address, token=""), make_patch())
        assert inbox.patches == []

    async def test_token_is_good_for_its_transfer_alone(self, ends: Ends) -> None:
        sender, receiver = ends
        inbox = Inbox()
        one = receiver.open_transfer("one", inbox)
        other = receiver.open_transfer("other", inbox)
        assert one.token != other.token
        await self.refused(sender, one, make_patch(transfer_id="other"))
        assert inbox.patches == []

    async def test_token_dies_with_its_transfer(self, ends: Ends) -> None:
        sender, receiver = ends
        inbox = Inbox()
        old = receiver.open_transfer("move", inbox)
        receiver.close_transfer("move")
        new = receiver.open_transfer("move", inbox)
        await self.refused(sender, old, make_patch())
        assert inbox.patches == []
        await sender.send(new, make_patch(), timeout_s=TIMEOUT_S)
        assert len(inbox.patches) == 1

    async def test_closed_transfer_refuses(self, ends: Ends) -> None:
        sender, receiver = ends
        inbox = Inbox()
        address = receiver.open_transfer("move", inbox)
        await sender.send(address, make_patch(watermark=1), timeout_s=TIMEOUT_S)
        receiver.close_transfer("move")
        receiver.close_transfer("move")
        receiver.close_transfer("never opened")
        await self.refused(sender, address, make_patch(watermark=2))
        assert inbox.watermarks == [1]

    async def test_no_handler_call_after_close_transfer(self, ends: Ends) -> None:
        sender, receiver = ends
        inbox = Inbox()
        address = receiver.open_transfer("move", inbox)
        sends = [
            asyncio.ensure_future(sender.send(address, make_patch(bytes(100_000), watermark=w), timeout_s=TIMEOUT_S))
            for w in range(1, 20)
        ]
        await asyncio.sleep(0)
        receiver.close_transfer("move")
        applied = inbox.watermarks
        results = await asyncio.gather(*sends, return_exceptions=True)
        assert inbox.watermarks == applied
        assert [w for w, result in enumerate(results, 1) if result is None] == applied
        assert isinstance(results[-1], TransportError)

    async def test_opening_twice_is_an_error(self, ends: Ends) -> None:
        _, receiver = ends
        receiver.open_transfer("move", Inbox())
        with pytest.raises(ValueError, match="move"):
            receiver.open_transfer("move", Inbox())

    async def test_handler_error_reaches_the_sender(self, ends: Ends) -> None:
        sender, receiver = ends

        def handler(patch: Patch) -> None:
            raise RuntimeError("slots are gone")

        address = receiver.open_transfer("move", handler)
        assert "slots are gone" in await self.refused(sender, address, make_patch())

    async def test_handler_may_close_its_transfer(self, ends: Ends) -> None:
        sender, receiver = ends
        inbox = Inbox()

        def handler(patch: Patch) -> None:
            inbox(patch)
            receiver.close_transfer("move")

        address = receiver.open_transfer("move", handler)
        await sender.send(address, make_patch(watermark=1), timeout_s=TIMEOUT_S)
        await self.refused(sender, address, make_patch(watermark=2))
        assert inbox.watermarks == [1]

    async def test_broken_transfer_stays_broken_and_others_go_on(self, ends: Ends) -> None:
        sender, receiver = ends
        inbox, other = Inbox(), Inbox()
        address = receiver.open_transfer("move", inbox)
        other_address = receiver.open_transfer("other", other)
        await sender.send(address, make_patch(watermark=1), timeout_s=TIMEOUT_S)
        bad = replace(make_patch(watermark=2), checksum=0)
        await self.refused(sender, address, bad)
        await self.refused(sender, address, make_patch(watermark=3))
        await sender.send(other_address, make_patch(transfer_id="other"), timeout_s=TIMEOUT_S)
        assert inbox.watermarks == [1]
        assert other.watermarks == [1]

    # ---- peers and deadlines ----

    async def test_past_deadline(self, ends: Ends) -> None:
        sender, receiver = ends
        address = receiver.open_transfer("move", Inbox())
        with pytest.raises(TransportError):
            await sender.send(address, make_patch(bytes(8 << 20)), timeout_s=-1.0)

    async def test_peer_has_left(self, ends: Ends) -> None:
        sender, receiver = ends
        address = receiver.open_transfer("move", Inbox())
        await receiver.close()
        await self.refused(sender, address, make_patch())

    async def test_peer_leaves_while_sending(self, ends: Ends) -> None:
        sender, receiver = ends
        inbox = Inbox()
        address = receiver.open_transfer("move", inbox)
        sends = [
            asyncio.ensure_future(sender.send(address, make_patch(bytes(1 << 20), watermark=w), timeout_s=TIMEOUT_S))
            for w in range(1, 20)
        ]
        await asyncio.sleep(0)
        await receiver.close()
        applied = len(inbox.patches)
        results = await asyncio.gather(*sends, return_exceptions=True)
        assert len(inbox.patches) == applied
        assert isinstance(results[-1], TransportError)
        assert all(result is None or isinstance(result, TransportError) for result in results)

    async def test_close_fails_running_sends(self, ends: Ends) -> None:
        sender, receiver = ends
        address = receiver.open_transfer("move", Inbox())
        sends = [
            asyncio.ensure_future(sender.send(address, make_patch(bytes(1 << 20), watermark=w), timeout_s=TIMEOUT_S))
            for w in range(1, 20)
        ]
        await asyncio.sleep(0)
        await sender.close()
        await sender.close()
        results = await asyncio.gather(*sends, return_exceptions=True)
        assert isinstance(results[-1], TransportError)
        assert all(result is None or isinstance(result, TransportError) for result in results)
        await self.refused(sender, address, make_patch())

    async def test_cancelled_send_breaks_its_transfer(self, ends: Ends) -> None:
        sender, receiver = ends
        address = receiver.open_transfer("move", Inbox())
        send = asyncio.ensure_future(sender.send(address, make_patch(bytes(8 << 20)), timeout_s=TIMEOUT_S))
        await asyncio.sleep(0)
        send.cancel()
        with pytest.raises(asyncio.CancelledError):
            await send
        await self.refused(sender, address, make_patch(watermark=2))

    async def test_not_started(self, fresh_end: Callable[[], Transport]) -> None:
        end = fresh_end()
        with pytest.raises(TransportError):
            end.open_transfer("move", Inbox())
        with pytest.raises(TransportError):
            await end.send(Address("x", "nowhere"), make_patch(), timeout_s=TIMEOUT_S)
        await end.close()

    async def test_closed_opens_nothing(self, ends: Ends) -> None:
        _, receiver = ends
        await receiver.close()
        with pytest.raises(TransportError):
            receiver.open_transfer("move", Inbox())

    async def test_foreign_scheme(self, ends: Ends) -> None:
        sender, receiver = ends
        address = receiver.open_transfer("move", Inbox())
        await self.refused(sender, replace(address, scheme="pigeon"), make_patch())

    # ---- threads ----

    async def test_transfers_open_and_close_from_another_thread(self, ends: Ends) -> None:
        sender, receiver = ends
        inbox = Inbox()
        address = await asyncio.to_thread(receiver.open_transfer, "move", inbox)
        await sender.send(address, make_patch(watermark=1), timeout_s=TIMEOUT_S)
        await asyncio.to_thread(receiver.close_transfer, "move")
        await self.refused(sender, address, make_patch(watermark=2))
        assert inbox.watermarks == [1]
