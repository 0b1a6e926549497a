"""What a sending end remembers of its transfers."""

import asyncio

import pytest

from meshift.kv_memory.transport import outgoing
from meshift.kv_memory.transport.base import TransportError
from meshift.kv_memory.transport.outgoing import Outgoing, OutgoingTransfers, Turns


async def test_the_oldest_idle_transfer_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outgoing, "TRANSFERS_KEPT_MAX", 2)
    transfers: OutgoingTransfers[Outgoing] = OutgoingTransfers()
    running = transfers.get("running", Outgoing)
    async with transfers.sending(running, "move", 10.0):
        idle = transfers.get("idle", Outgoing)
        third = transfers.get("third", Outgoing)
        assert list(transfers) == [running, third]
        assert transfers.get("idle", Outgoing) is not idle


async def test_a_use_keeps_a_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outgoing, "TRANSFERS_KEPT_MAX", 2)
    transfers: OutgoingTransfers[Outgoing] = OutgoingTransfers()
    first = transfers.get("first", Outgoing)
    transfers.get("second", Outgoing)
    transfers.get("first", Outgoing)
    transfers.get("third", Outgoing)
    assert first in list(transfers)


async def test_any_end_but_the_good_one_breaks_it() -> None:
    transfers: OutgoingTransfers[Outgoing] = OutgoingTransfers()
    transfer = transfers.get("move", Outgoing)
    async with transfers.sending(transfer, "move", 10.0):
        pass
    assert transfer.broken is None
    with pytest.raises(KeyError):
        async with transfers.sending(transfer, "move", 10.0):
            raise KeyError("what happened")
    assert "what happened" in str(transfer.broken)
    with pytest.raises(TransportError, match="broken"):
        async with transfers.sending(transfer, "move", 10.0):
            pass
    assert transfer.users == 0


async def test_none_slips_past_one_that_is_about_to_leave() -> None:
    turns, taken = Turns(), []

    async def take(name: str, hold: asyncio.Event | None = None) -> None:
        async with turns.turn():
            taken.append(name)
            if hold is not None:
                await hold.wait()

    hold = asyncio.Event()
    first, second = asyncio.ensure_future(take("first", hold)), asyncio.ensure_future(take("second"))
    await asyncio.sleep(0)
    hold.set()
    second.cancel()
    third = asyncio.ensure_future(take("third"))
    await asyncio.wait([first, second])
    await asyncio.sleep(0)
    assert taken == ["first"]
    turns.fail("second has left")
    with pytest.raises(TransportError, match="second has left"):
        await asyncio.wait_for(third, 10.0)


async def test_turns_come_in_order() -> None:
    turns, taken = Turns(), []

    async def take(number: int) -> None:
        async with turns.turn():
            await asyncio.sleep(0)
            taken.append(number)

    await asyncio.wait_for(asyncio.gather(*(take(number) for number in range(20))), 10.0)
    assert taken == list(range(20))
