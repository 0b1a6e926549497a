"""What can go wrong on a MemoryBus, from a seed."""

import asyncio
import random
from typing import Any

import pytest

from meshift.schemas.errors import Overloaded, PeerGone, PeerTimeout
from meshift.schemas.instances import DispatchRequest, StatusRequest
from meshift.schemas.requests import SubmitReply
from meshift.services.bus.base import ServiceInfo
from meshift.services.bus.faults import Faults
from meshift.services.bus.memory import MemoryBus
from meshift.services.bus.settings import BusLimits
from meshift.services.simulation import virtual_time
from tests.contract.bus_kit import ASK, REPLY, dispatch_request, numbered
from tests.contract.memory_kit import SEED, World, in_virtual_time


def stormy(seed: int) -> tuple[list[tuple[float, str, int]], list[str]]:
    """Some traffic with all faults: what arrived when, and how requests ended."""
    world = World("a", "b", "c", seed=seed)
    world.network.faults.set(drop=0.1, duplicate=0.1, delay=0.3, delay_s_max=0.02)
    ends: list[str] = []

    async def ask(number: int) -> None:
        try:
            await world.ask("a", "c", number=number)
            ends.append(f"{number} answered")
        except PeerTimeout:
            ends.append(f"{number} timed out")

    async def main() -> None:
        await world.start()
        tasks = []
        for number in range(1, 101):
            world.buses["a"].publish("x", numbered(number))
            tasks.append(asyncio.ensure_future(ask(number)))
            await asyncio.sleep(0.002)
        await asyncio.gather(*tasks)

    virtual_time.run(main())
    return world.log, ends


@pytest.mark.parametrize("seed", range(3))
def test_one_seed_one_course(seed: int) -> None:
    first = stormy(seed)
    assert stormy(seed) == first
    assert stormy(seed + 100) != first
    assert any("timed out" in end for end in first[1])
    assert any("answered" in end for end in first[1])


@in_virtual_time
async def test_messages_take_the_delay() -> None:
    world = World("a", "b", delay_s=0.25)
    await world.start()
    world.buses["a"].publish("x", numbered(1))
    await world.settle()
    assert world.log == [(0.25, "a", 1), (0.25, "b", 1)]
    began = asyncio.get_running_loop().time()
    await world.ask("a", "b", timeout_s=1.0)
    assert asyncio.get_running_loop().time() - began == pytest.approx(0.5)


@in_virtual_time
async def test_links_have_delays_of_their_own_and_keep_order() -> None:
    def link_delay_s(sender: str, receiver: str) -> float:
        return 0.1 if receiver == "b" else 0.0

    world = World("a", "b", link_delay_s=link_delay_s)
    await world.start()
    for number in range(20):
        world.buses["a"].publish("x", numbered(number))
    await world.settle()
    assert world.got("a") == world.got("b") == list(range(20))
    assert {(name, round(when, 6)) for when, name, _ in world.log} == {("a", 0.001), ("b", 0.101)}


@in_virtual_time
async def test_a_certain_drop_loses_all_and_its_end_none() -> None:
    world = World("a", "b")
    await world.start()
    world.network.faults.set(drop=1.0)
    world.buses["a"].publish("x", numbered(1))
    with pytest.raises(PeerTimeout):
        await world.ask("a", "b")
    world.network.faults.set()
    world.buses["a"].publish("x", numbered(2))
    await world.ask("a", "b", number=3)
    await world.settle()
    assert world.got("b") == [2, 3]


@in_virtual_time
async def test_a_dropped_answer_is_a_time_out_of_what_was_done() -> None:
    world = World("a", "b")
    await world.start()
    world.network.faults.set(drop=1.0, link=lambda sender, receiver, subject: sender == "b")
    began = asyncio.get_running_loop().time()
    with pytest.raises(PeerTimeout):
        await world.ask("a", "b", timeout_s=0.5)
    assert asyncio.get_running_loop().time() - began == pytest.approx(0.5)
    assert world.got("b") == [1]


@in_virtual_time
async def test_faults_can_be_kept_to_a_subject() -> None:
    world = World("a", "b")
    await world.start()
    world.network.faults.set(drop=1.0, link=lambda sender, receiver, subject: subject == "x")
    world.buses["a"].publish("x", numbered(1))
    assert await world.ask("a", "b", number=2) == REPLY
    await world.settle()
    assert world.got("b") == [2]


@in_virtual_time
async def test_a_duplicate_arrives_twice_and_its_second_answer_is_nobody_s() -> None:
    world = World("a", "b")
    await world.start()
    world.network.faults.set(duplicate=1.0)
    world.buses["a"].publish("x", numbered(1))
    await world.settle()
    assert await world.ask("a", "b", number=2) == REPLY
    await world.settle()
    assert world.got("b") == [1, 1, 2, 2]
    assert await world.ask("a", "b", number=3) == REPLY


@in_virtual_time
async def test_delays_reorder() -> None:
    world = World("a", "b")
    await world.start()
    world.network.faults.set(delay=0.5, delay_s_max=0.1)
    for number in range(50):
        world.buses["a"].publish("x", numbered(number))
    await world.settle()
    assert world.got("b") != list(range(50))
    assert sorted(world.got("b")) == list(range(50))
    assert max(when for when, _, _ in world.log) <= 0.101


@in_virtual_time
async def test_a_partition_cuts_both_ways_until_it_heals() -> None:
    world = World("a", "b", "c")
    await world.start()
    faults = world.network.faults
    partition = faults.partition({"a"}, {"b"})
    world.buses["a"].publish("x", numbered(1))
    world.buses["b"].publish("x", numbered(2))
    for sender, receiver in (("a", "b"), ("b", "a")):
        with pytest.raises(PeerTimeout):
            await world.ask(sender, receiver, number=9)
    assert await world.ask("a", "c", number=3) == REPLY
    await world.settle()
    assert (world.got("a"), world.got("b"), world.got("c")) == ([1], [2], [1, 2, 3])
    faults.heal(partition)
    faults.heal(partition)
    assert not faults.active
    assert await world.ask("a", "b", number=4) == REPLY


@in_virtual_time
async def test_a_one_way_partition_lets_requests_in_and_no_answer_out() -> None:
    world = World("a", "b")
    await world.start()
    world.network.faults.partition({"b"}, {"a"}, one_way=True)
    world.network.faults.partition({"c"}, {"d"})
    with pytest.raises(PeerTimeout):
        await world.ask("a", "b", number=1)
    world.buses["b"].publish("x", numbered(2))
    world.buses["a"].publish("x", numbered(3))
    await world.settle()
    assert (world.got("a"), world.got("b")) == ([3], [1, 2, 3])
    world.network.faults.heal()
    assert await world.ask("a", "b", number=4) == REPLY


@pytest.mark.parametrize("fault", [{"drop": 1.1}, {"duplicate": -0.1}, {"delay": 0.5}, {"delay_s_max": -1.0}])
def test_impossible_faults_are_refused(fault: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be|is a probability"):
        Faults(random.Random(SEED), **fault)


@in_virtual_time
async def test_a_killed_client_sends_and_receives_nothing() -> None:
    world = World("a", "b")
    await world.start()
    victim = world.buses["b"]
    world.buses["a"].publish("x", numbered(1))  # under way when it dies
    asking = asyncio.ensure_future(world.ask("b", "a", timeout_s=0.5))
    await asyncio.sleep(0)
    world.network.kill("b")
    victim.publish("x", numbered(2))
    with pytest.raises(PeerGone):
        await world.ask("a", "b")
    with pytest.raises(PeerTimeout):
        await victim.flush(timeout_s=0.1)
    with pytest.raises(PeerTimeout):
        await asking
    await world.settle()
    assert world.got("b") == []
    assert world.got("a") == [1, 1], "what it had sent before arrives"
    await victim.close()
    with pytest.raises(ValueError, match="no bus client named 'b'"):
        world.network.kill("b")


@in_virtual_time
async def test_a_client_killed_while_it_serves_never_answers() -> None:
    world = World("a", "b")
    await world.start()

    async def later(_: StatusRequest) -> SubmitReply:
        await asyncio.sleep(0.01)
        return REPLY

    world.buses["b"].serve("later", "later", StatusRequest, later)
    asking = asyncio.ensure_future(world.buses["a"].request("later", ASK, SubmitReply, timeout_s=0.1))
    await asyncio.sleep(0.005)
    closing = asyncio.ensure_future(world.buses["b"].close())
    await asyncio.sleep(0)
    world.network.kill("b")
    with pytest.raises(PeerTimeout):
        await asking
    await closing


@in_virtual_time
async def test_a_client_that_closed_its_endpoint_and_was_killed_says_nothing() -> None:
    world = World("a", "b")
    await world.start()
    endpoint = world.buses["b"].serve("more", "more", StatusRequest, lambda _: REPLY)
    asking = asyncio.ensure_future(world.buses["a"].request("more", ASK, SubmitReply, timeout_s=0.1))
    await asyncio.sleep(0)
    endpoint.close()
    world.network.kill("b")
    with pytest.raises(PeerTimeout):
        await asking


@in_virtual_time
async def test_a_name_is_one_client_s_and_free_after_its_death() -> None:
    world = World("a")
    await world.start()
    other = MemoryBus(world.network, "a")
    with pytest.raises(ValueError, match="'a' is there already"):
        await other.start(ServiceInfo(name="tester", instance="a"))
    world.network.kill("a")
    await other.start(ServiceInfo(name="tester", instance="a"))
    other.serve("ask", "ask.a", DispatchRequest, lambda _: REPLY)
    assert await other.request("ask.a", dispatch_request(), SubmitReply, timeout_s=0.1) == REPLY


@in_virtual_time
async def test_a_disconnected_client_queues_and_comes_back() -> None:
    world = World("a", "b")
    world.buses["a"] = MemoryBus(world.network, "a", limits=BusLimits(publish_queue_max=3))
    await world.start()
    client, service = world.buses["a"], world.buses["b"]
    world.network.disconnect("a")
    service.publish("x", numbered(1))  # lost to it
    for number in (2, 3):
        client.publish("x", numbered(number))
    asking = asyncio.ensure_future(world.ask("a", "b", timeout_s=5.0, number=4))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        client.publish("x", numbered(5))
    with pytest.raises(PeerGone):
        await world.ask("b", "a")
    await world.settle()
    assert world.got("b") == [1]
    world.network.reconnect("a")
    assert await asking == REPLY
    await world.settle()
    assert (world.got("a"), world.got("b")) == ([2, 3], [1, 2, 3, 4])
    assert await world.ask("b", "a", number=6) == REPLY
    assert client.counters.reconnects == 1


@in_virtual_time
async def test_an_answer_ready_while_disconnected_waits_and_one_too_many_is_lost() -> None:
    world = World("a", "b")
    world.buses["b"] = MemoryBus(world.network, "b", limits=BusLimits(publish_queue_max=1))
    await world.start()
    gate = asyncio.Event()

    async def later(_: StatusRequest) -> SubmitReply:
        await gate.wait()
        return REPLY

    world.buses["b"].serve("later", "later", StatusRequest, later)
    asked = [
        asyncio.ensure_future(world.buses["a"].request("later", ASK, SubmitReply, timeout_s=1.0)) for _ in range(2)
    ]
    await asyncio.sleep(0.01)
    world.network.disconnect("b")
    gate.set()
    await asyncio.sleep(0.01)
    world.network.reconnect("b")
    ends = await asyncio.gather(*asked, return_exceptions=True)
    assert ends[0] == REPLY
    assert isinstance(ends[1], PeerTimeout)
    assert world.buses["b"].counters.dropped == 1


@in_virtual_time
async def test_a_close_while_disconnected_forgets_the_queue() -> None:
    world = World("a", "b")
    await world.start()
    world.network.disconnect("a")
    world.buses["a"].publish("x", numbered(1))
    await world.buses["a"].close()
    await world.settle()
    assert world.log == []
