"""MemoryTransport: its timing and its faults, in virtual time."""

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import pytest

from meshift.kv_memory.staging import StagingPool
from meshift.kv_memory.transport import (
    Address,
    DistributedTransport,
    FaultRates,
    Gate,
    Link,
    MemoryFabric,
    MemoryTransport,
    NixlTransport,
    TcpTransport,
    TransportError,
    TransportLimits,
    create_transport,
)
from meshift.kv_memory.transport.memory import STREAMS_KEPT_MAX
from tests.contract.transport_suite import Inbox, make_patch
from tests.unit.kv_memory.virtual_time import run_virtual

SEED = 11


async def two_ends(fabric: MemoryFabric) -> tuple[MemoryTransport, MemoryTransport]:
    source, destination = MemoryTransport(fabric, "s"), MemoryTransport(fabric, "d")
    await source.start()
    await destination.start()
    return source, destination


async def timed(send: Coroutine[Any, Any, None]) -> tuple[float, str | None]:
    """When the send ended, and its error."""
    try:
        await send
    except TransportError as error:
        return asyncio.get_running_loop().time(), str(error)
    return asyncio.get_running_loop().time(), None


# ---- timing ----


def test_send_takes_size_over_bandwidth_and_a_round_trip() -> None:
    async def main() -> None:
        fabric = MemoryFabric(link=Link(bandwidth_bytes_per_s=1000.0, latency_s=0.25))
        fabric.set_link("d", "s", Link(latency_s=0.5))
        source, destination = await two_ends(fabric)
        address = destination.open_transfer("move", Inbox())
        end, error = await timed(source.send(address, make_patch(bytes(2000)), timeout_s=9))
        assert error is None
        assert end == pytest.approx(2.0 + 0.25 + 0.5)

    run_virtual(main())


def test_a_sending_end_sends_one_patch_at_a_time() -> None:
    async def main() -> None:
        fabric = MemoryFabric(link=Link(bandwidth_bytes_per_s=1000.0))
        source, destination = await two_ends(fabric)
        other = MemoryTransport(fabric, "other")
        await other.start()
        addresses = [destination.open_transfer("move", Inbox()), other.open_transfer("move", Inbox())]
        ends = await asyncio.gather(*(timed(source.send(a, make_patch(bytes(1000)), timeout_s=9)) for a in addresses))
        assert [end for end, _ in ends] == pytest.approx([1.0, 2.0])
        back = source.open_transfer("back", Inbox())
        meanwhile = await asyncio.gather(
            timed(source.send(addresses[0], make_patch(bytes(1000)), timeout_s=9)),
            timed(other.send(back, make_patch(bytes(1000), transfer_id="back"), timeout_s=9)),
        )
        assert [end for end, _ in meanwhile] == pytest.approx([3.0, 3.0])

    run_virtual(main())


def test_wire_bytes_replaces_the_payload_size() -> None:
    async def main() -> None:
        fabric = MemoryFabric(
            link=Link(bandwidth_bytes_per_s=100.0), wire_bytes=lambda patch: 50.0 * patch.rectangle.tokens
        )
        source, destination = await two_ends(fabric)
        address = destination.open_transfer("move", Inbox())
        end, _ = await timed(source.send(address, make_patch(b"hash", watermark=6), timeout_s=9))
        assert end == pytest.approx(3.0)

    run_virtual(main())


def test_order_holds_when_the_link_gets_faster() -> None:
    async def main() -> None:
        fabric = MemoryFabric(link=Link(latency_s=1.0))
        source, destination = await two_ends(fabric)
        inbox = Inbox()
        address = destination.open_transfer("move", inbox)
        first = asyncio.ensure_future(timed(source.send(address, make_patch(watermark=1), timeout_s=9)))
        await asyncio.sleep(0.1)
        fabric.set_link("s", "d", Link())
        second = await timed(source.send(address, make_patch(watermark=2), timeout_s=9))
        assert [end for end, _ in (await first, second)] == pytest.approx([2.0, 2.0])
        assert inbox.watermarks == [1, 2]

    run_virtual(main())


# ---- faults ----


def test_lost_patch_fails_at_its_deadline_and_takes_its_transfer_along() -> None:
    async def main() -> None:
        fabric = MemoryFabric(faults=FaultRates(lost=1.0))
        source, destination = await two_ends(fabric)
        inbox, other = Inbox(), Inbox()
        address = destination.open_transfer("move", inbox)
        lost = asyncio.ensure_future(timed(source.send(address, make_patch(watermark=1), timeout_s=3)))
        await asyncio.sleep(0)
        fabric.faults = FaultRates()
        behind = asyncio.ensure_future(timed(source.send(address, make_patch(watermark=2), timeout_s=2)))
        apart = destination.open_transfer("other", other)
        await source.send(apart, make_patch(transfer_id="other"), timeout_s=3)
        assert (await lost)[0] == pytest.approx(3.0)
        assert (await behind)[0] == pytest.approx(2.0)
        with pytest.raises(TransportError, match="broken"):
            await source.send(address, make_patch(watermark=3), timeout_s=3)
        assert (inbox.watermarks, other.watermarks) == ([], [1])

    run_virtual(main())


@pytest.mark.parametrize("payload", [b"", b"x", bytes(5000)])
def test_corrupted_patch_is_refused_at_once(payload: bytes) -> None:
    async def main() -> None:
        fabric = MemoryFabric(faults=FaultRates(corrupted=1.0), rng=random.Random(SEED))
        source, destination = await two_ends(fabric)
        inbox = Inbox()
        address = destination.open_transfer("move", inbox)
        end, error = await timed(source.send(address, make_patch(payload), timeout_s=3))
        assert end == 0.0
        assert error is not None
        assert "checksum" in error
        assert inbox.patches == []

    run_virtual(main())


def test_duplicate_comes_right_behind() -> None:
    async def main() -> None:
        fabric = MemoryFabric(faults=FaultRates(duplicated=1.0))
        source, destination = await two_ends(fabric)
        inbox = Inbox()
        address = destination.open_transfer("move", inbox)
        await asyncio.gather(*(source.send(address, make_patch(watermark=w), timeout_s=3) for w in (1, 2, 3)))
        assert inbox.watermarks == [1, 1, 2, 2, 3, 3]

    run_virtual(main())


def test_lost_acknowledgement_is_a_timeout_of_an_applied_patch() -> None:
    async def main() -> None:
        fabric = MemoryFabric(faults=FaultRates(acknowledgement_lost=1.0))
        source, destination = await two_ends(fabric)
        inbox = Inbox()
        address = destination.open_transfer("move", inbox)
        end, error = await timed(source.send(address, make_patch(), timeout_s=3))
        assert error is not None
        assert end == pytest.approx(3.0)
        assert inbox.watermarks == [1]

    run_virtual(main())


def test_partition_swallows_what_is_on_the_way_and_heals_for_new_transfers() -> None:
    async def main() -> None:
        fabric = MemoryFabric(link=Link(latency_s=1.0))
        source, destination = await two_ends(fabric)
        inbox = Inbox()
        address = destination.open_transfer("move", inbox)
        sending = asyncio.ensure_future(timed(source.send(address, make_patch(), timeout_s=5)))
        await asyncio.sleep(0.5)
        fabric.partition("d", "s")
        assert (await sending)[0] == pytest.approx(5.0)
        fabric.heal("s", "d")
        assert inbox.patches == []
        again = destination.open_transfer("again", inbox)
        await source.send(again, make_patch(transfer_id="again"), timeout_s=5)
        assert len(inbox.patches) == 1

    run_virtual(main())


def test_partition_after_application_loses_the_answer() -> None:
    async def main() -> None:
        fabric = MemoryFabric(link=Link(latency_s=1.0))
        source, destination = await two_ends(fabric)
        inbox = Inbox()
        address = destination.open_transfer("move", inbox)
        sending = asyncio.ensure_future(timed(source.send(address, make_patch(), timeout_s=5)))
        await asyncio.sleep(1.5)
        fabric.partition("s", "d")
        assert (await sending)[0] == pytest.approx(5.0)
        assert len(inbox.patches) == 1

    run_virtual(main())


def test_killed_receiver_refuses_what_is_on_the_way() -> None:
    async def main() -> None:
        fabric = MemoryFabric(link=Link(latency_s=1.0))
        source, destination = await two_ends(fabric)
        inbox = Inbox()
        address = destination.open_transfer("move", inbox)
        sending = asyncio.ensure_future(timed(source.send(address, make_patch(), timeout_s=9)))
        await asyncio.sleep(0.5)
        fabric.kill("d")
        end, error = await sending
        assert error == "nobody receives at d rank 0"
        assert end == pytest.approx(2.0)
        assert inbox.patches == []
        with pytest.raises(TransportError):
            destination.open_transfer("again", inbox)

    run_virtual(main())


def test_killed_sender_fails_and_what_it_sent_is_dropped() -> None:
    async def main() -> None:
        fabric = MemoryFabric(link=Link(latency_s=1.0))
        source, destination = await two_ends(fabric)
        inbox = Inbox()
        address = destination.open_transfer("move", inbox)
        sending = asyncio.ensure_future(timed(source.send(address, make_patch(), timeout_s=9)))
        await asyncio.sleep(0.5)
        fabric.kill("s")
        end, error = await sending
        assert error == "killed"
        assert end == pytest.approx(0.5)
        await asyncio.sleep(5)
        assert inbox.patches == []

    run_virtual(main())


def test_restarted_location_is_somebody_else() -> None:
    async def main() -> None:
        fabric = MemoryFabric()
        source, destination = await two_ends(fabric)
        old = destination.open_transfer("move", Inbox())
        with pytest.raises(TransportError, match="in use"):
            await MemoryTransport(fabric, "d").start()
        fabric.kill("d")
        reborn = MemoryTransport(fabric, "d")
        await reborn.start()
        inbox = Inbox()
        new = reborn.open_transfer("move", inbox)
        with pytest.raises(TransportError, match="not open"):
            await source.send(old, make_patch(), timeout_s=1)
        await source.send(new, make_patch(), timeout_s=1)
        await destination.close()
        await source.send(new, make_patch(), timeout_s=1)
        with pytest.raises(TransportError, match="closed"):
            await destination.start()
        assert len(inbox.patches) == 2

    run_virtual(main())


def test_ranks_of_a_location_receive_apart_and_die_together() -> None:
    async def main() -> None:
        fabric = MemoryFabric()
        source, first = await two_ends(fabric)
        second = MemoryTransport(fabric, "d", rank=1)
        await second.start()
        at_first, at_second = Inbox(), Inbox()
        addresses = [first.open_transfer("move", at_first), second.open_transfer("move", at_second)]
        assert [address.rank for address in addresses] == [0, 1]
        for address in addresses:
            await source.send(address, make_patch(), timeout_s=1)
        assert (len(at_first.patches), len(at_second.patches)) == (1, 1)
        fabric.kill("d")
        assert (first.closed, second.closed, source.closed) == (True, True, False)

    run_virtual(main())


def random_run(seed: int) -> list[tuple[float, str | None]]:
    """The ends of 60 sends of 6 transfers under all faults; also checks what was applied against them."""

    async def main() -> list[tuple[float, str | None]]:
        rates = FaultRates(lost=0.05, corrupted=0.05, duplicated=0.2, acknowledgement_lost=0.05)
        fabric = MemoryFabric(link=Link(1e4, 0.01), faults=rates, rng=random.Random(seed))
        source, destination = await two_ends(fabric)
        inboxes = [Inbox() for _ in range(6)]
        addresses = [destination.open_transfer(str(i), inbox) for i, inbox in enumerate(inboxes)]
        results = await asyncio.gather(
            *(
                timed(source.send(a, make_patch(bytes(99), transfer_id=str(i), watermark=w), timeout_s=5))
                for w in range(1, 11)
                for i, a in enumerate(addresses)
            )
        )
        for i, inbox in enumerate(inboxes):
            applied = sorted(set(inbox.watermarks))
            assert inbox.watermarks == sorted(inbox.watermarks), seed
            assert applied == list(range(1, len(applied) + 1)), seed
            known = [w for w, (_, error) in enumerate(results[i::6], 1) if error is None]
            assert set(known) <= set(applied), seed
        return results

    return run_virtual(main())


@pytest.mark.parametrize("seed", range(20))
def test_faults_leave_a_prefix_in_order_and_repeat_from_their_seed(seed: int) -> None:
    assert random_run(seed) == random_run(seed)


def test_faults_are_drawn_at_their_rate() -> None:
    results = [result for seed in range(20) for result in random_run(seed)]
    failed = sum(error is not None for _, error in results)
    assert 0 < failed < len(results)


# ---- bounds and the factory ----


def test_memory_of_past_transfers_is_bounded() -> None:
    async def main() -> None:
        source, destination = await two_ends(MemoryFabric())
        for i in range(STREAMS_KEPT_MAX + 10):
            address = destination.open_transfer(str(i), Inbox())
            await source.send(address, make_patch(transfer_id=str(i)), timeout_s=1)
            destination.close_transfer(str(i))
        assert len(source._streams) == STREAMS_KEPT_MAX
        assert not source._running
        assert not destination._incoming
        timers = getattr(asyncio.get_running_loop(), "_scheduled")  # noqa: B009 - not in the type stubs
        assert [timer for timer in timers if not timer.cancelled()] == []

    run_virtual(main())


def test_factory() -> None:
    fabric = MemoryFabric()
    transport = create_transport("memory", location="here", rank=3, fabric=fabric)
    assert isinstance(transport, MemoryTransport)
    assert (transport.location, transport.rank) == ("here", 3)
    assert isinstance(create_transport("tcp"), TcpTransport)
    assert isinstance(create_transport("tcp", location="127.0.0.1:5000", limits=TransportLimits()), TcpTransport)
    assert isinstance(create_transport("nixl", staging=StagingPool(1)), NixlTransport)
    gate = Gate()
    distributed = create_transport("distributed", rank=2, gate=gate)
    assert isinstance(distributed, DistributedTransport)
    assert (distributed.rank, distributed.gate) == (2, gate)
    with pytest.raises(ValueError, match="fabric"):
        create_transport("memory", location="here")
    with pytest.raises(ValueError, match="pigeon"):
        create_transport("pigeon", location="here", fabric=fabric)


def test_address_carries_no_secret_that_repeats() -> None:
    async def main() -> None:
        _, destination = await two_ends(MemoryFabric(rng=random.Random(SEED)))
        addresses: list[Address] = [destination.open_transfer(str(i), Inbox()) for i in range(100)]
        assert len({address.token for address in addresses}) == 100

    run_virtual(main())
