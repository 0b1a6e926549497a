"""How TcpTransport uses connections and keeps to a rate, and its own life."""

import asyncio
import socket
from dataclasses import replace

import pytest

from meshift.kv_memory.transport.base import TransportError
from meshift.kv_memory.transport.tcp import TcpTransport
from tests.contract.transport_suite import Inbox, make_patch
from tests.unit.kv_memory.tcp_kit import (
    LIMITS,
    SOON_S,
    TIMEOUT_S,
    fails,
    started,
    until,
)


async def test_a_connection_is_used_again() -> None:
    async with started() as receiver, started() as sender:
        for name in ("one", "two", "three"):
            address = receiver.open_transfer(name, Inbox())
            for watermark in (1, 2):
                await sender.send(address, make_patch(transfer_id=name, watermark=watermark), timeout_s=TIMEOUT_S)
            receiver.close_transfer(name)
        assert (sender.connection_count, receiver.connection_count) == (1, 1)


async def test_connections_to_a_peer_are_bounded_and_others_wait() -> None:
    limits = replace(LIMITS, connections_per_peer_max=2)
    async with started(limits) as receiver, started(limits) as sender:
        names = [f"move-{index}" for index in range(10)]
        inboxes = {name: Inbox() for name in names}
        sends = [
            sender.send(
                receiver.open_transfer(name, inboxes[name]),
                make_patch(bytes(300_000), transfer_id=name),
                timeout_s=TIMEOUT_S,
            )
            for name in names
        ]
        await asyncio.gather(*sends)
        assert sender.connection_count == 2
        assert all(len(inbox.patches) == 1 for inbox in inboxes.values())


async def test_an_idle_connection_is_closed_and_made_again() -> None:
    limits = replace(LIMITS, idle_timeout_s=SOON_S)
    async with started() as receiver, started(limits) as sender:
        inbox = Inbox()
        address = receiver.open_transfer("move", inbox)
        await sender.send(address, make_patch(watermark=1), timeout_s=TIMEOUT_S)
        await until(lambda: sender.connection_count == 0)
        await until(lambda: receiver.connection_count == 0)
        await sender.send(address, make_patch(watermark=2), timeout_s=TIMEOUT_S)
        assert inbox.watermarks == [1, 2]


async def test_a_receiver_that_restarted_gets_a_new_connection() -> None:
    async with started() as sender:
        first = TcpTransport(limits=LIMITS)
        await first.start()
        address = first.open_transfer("move", Inbox())
        await sender.send(address, make_patch(), timeout_s=TIMEOUT_S)
        await first.close()
        await fails(sender.send(address, make_patch(), timeout_s=TIMEOUT_S))
        second = TcpTransport(port=int(address.location.rsplit(":")[1]), limits=LIMITS)
        await second.start()
        inbox = Inbox()
        await sender.send(second.open_transfer("move", inbox), make_patch(), timeout_s=TIMEOUT_S)
        assert inbox.watermarks == [1]
        await second.close()


async def test_the_rate_is_kept_by_all_transfers_together() -> None:
    rate = 20e6
    async with started() as receiver, started(replace(LIMITS, bytes_per_s=rate)) as sender:
        loop = asyncio.get_running_loop()
        addresses = {name: receiver.open_transfer(name, Inbox()) for name in ("one", "two")}
        start_s = loop.time()
        await asyncio.gather(
            *(
                sender.send(address, make_patch(bytes(1_000_000), transfer_id=name), timeout_s=TIMEOUT_S)
                for name, address in addresses.items()
            )
        )
        assert loop.time() - start_s >= 2_000_000 / rate * 0.85


async def test_a_small_patch_does_not_wait_for_another_transfers_large_one() -> None:
    async with started() as receiver, started(replace(LIMITS, bytes_per_s=20e6)) as sender:
        order: list[str] = []
        large = receiver.open_transfer("large", lambda patch: order.append("large"))
        small = receiver.open_transfer("small", lambda patch: order.append("small"))
        await asyncio.gather(
            sender.send(large, make_patch(bytes(2_000_000), transfer_id="large"), timeout_s=TIMEOUT_S),
            sender.send(small, make_patch(b"few", transfer_id="small"), timeout_s=TIMEOUT_S),
        )
        assert order == ["small", "large"]


async def test_a_transfer_that_broke_while_it_waited_for_a_connection_sends_nothing() -> None:
    limits = replace(LIMITS, connections_per_peer_max=1)
    async with started(limits) as receiver, started(limits) as sender:
        inbox = Inbox()
        busy = receiver.open_transfer("busy", Inbox())
        address = receiver.open_transfer("move", inbox)
        holding = asyncio.ensure_future(
            sender.send(busy, make_patch(bytes(8 << 20), transfer_id="busy"), timeout_s=TIMEOUT_S)
        )
        await asyncio.sleep(0)
        waiting = [
            asyncio.ensure_future(sender.send(address, make_patch(watermark=w), timeout_s=TIMEOUT_S)) for w in (1, 2)
        ]
        await asyncio.sleep(0)
        waiting[1].cancel()
        await holding
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(results[0], TransportError)
        assert inbox.patches == []


# ---- the ends themselves ----


async def test_a_port_in_use() -> None:
    async with started() as first:
        second = TcpTransport(port=int(first.location.rsplit(":")[1]))
        with pytest.raises(TransportError, match="can't listen"):
            await second.start()
        await second.close()


async def test_starting_twice_and_after_close() -> None:
    end = TcpTransport()
    await end.start()
    location = end.location
    await end.start()
    assert end.location == location
    await end.close()
    await end.close()
    with pytest.raises(TransportError, match="closed"):
        await end.start()


def test_a_wildcard_needs_a_name_for_others() -> None:
    with pytest.raises(ValueError, match="advertised"):
        TcpTransport("0.0.0.0")


async def test_the_advertised_host_is_what_others_are_told() -> None:
    end = TcpTransport("0.0.0.0", advertised_host="127.0.0.1", limits=LIMITS)
    await end.start()
    inbox = Inbox()
    address = end.open_transfer("move", inbox)
    assert address.location.startswith("127.0.0.1:")
    async with started() as sender:
        await sender.send(address, make_patch(), timeout_s=TIMEOUT_S)
    await end.close()
    assert inbox.watermarks == [1]


async def test_a_name_is_resolved() -> None:
    async with started() as receiver, started() as sender:
        inbox = Inbox()
        address = receiver.open_transfer("move", inbox)
        named = replace(address, location=address.location.replace("127.0.0.1", "localhost"))
        await sender.send(named, make_patch(), timeout_s=TIMEOUT_S)
        assert inbox.watermarks == [1]


async def test_accepting_goes_on_after_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("meshift.kv_memory.transport.tcp_receiver.ACCEPT_PAUSE_S", 0.001)
    loop = asyncio.get_running_loop()
    accept, failures = loop.sock_accept, [OSError("too many open files")]

    async def failing(sock: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise failures.pop()
        return await accept(sock)

    monkeypatch.setattr(loop, "sock_accept", failing)
    async with started() as receiver, started() as sender:
        inbox = Inbox()
        await sender.send(receiver.open_transfer("move", inbox), make_patch(), timeout_s=TIMEOUT_S)
        assert inbox.watermarks == [1]
    assert "too many open files" in caplog.text
