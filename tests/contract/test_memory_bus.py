"""MemoryBus: the suite, on both loops and in both modes, and its parts."""

import asyncio
import random
from collections.abc import Coroutine
from typing import Any, ClassVar

import pytest

from meshift.schemas.instances import InstanceGone, StatusRequest
from meshift.services.bus import memory_network
from meshift.services.bus.base import Bus, Propagator, ServiceInfo
from meshift.services.bus.lifecycle import ClientEvent, ClientState, next_state
from meshift.services.bus.memory import MemoryBus, MemoryNetwork, Mode
from meshift.services.bus.settings import BusLimits
from meshift.services.simulation import virtual_time
from tests.contract.bus_kit import ASK, Buses, Mailbox, numbered
from tests.contract.bus_suite import BusSuite
from tests.contract.memory_kit import SEED, World, in_virtual_time


def buses_of(network: MemoryNetwork) -> Buses:
    """Clients of `network`."""

    def make(name: str, limits: BusLimits, propagator: Propagator | None) -> Bus:
        return MemoryBus(network, name, limits=limits, propagator=propagator)

    return Buses(make)


class MemorySuite(BusSuite):
    """The suite on a memory bus."""

    mode: ClassVar[Mode] = Mode.VALIDATE
    delay_s: ClassVar[float] = 0.0

    @pytest.fixture
    def buses(self) -> Buses:
        print(f"seed {SEED}")
        return buses_of(MemoryNetwork(random.Random(SEED), mode=self.mode, delay_s=self.delay_s))


class TestOnRealLoop(MemorySuite):
    """As services in one process use it."""


class TestWithDelay(MemorySuite):
    """The same, with timers instead of immediate calls."""

    delay_s = 0.001


class VirtualSuite(MemorySuite):
    """The suite in virtual time."""

    @staticmethod
    def run_loop(main: Coroutine[Any, Any, None]) -> None:
        virtual_time.run(main)


class TestOnVirtualLoop(VirtualSuite):
    """As simulation uses it."""

    delay_s = 0.001


class TestPassingObjects(VirtualSuite):
    """As long sweeps use it."""

    mode = Mode.DIRECT
    encodes = False


@pytest.mark.parametrize("state", ClientState)
@pytest.mark.parametrize("event", ClientEvent)
def test_every_pair_of_state_and_event(state: ClientState, event: ClientEvent) -> None:
    ends = {ClientState.CLOSED, ClientState.KILLED}
    allowed = {
        ClientEvent.START: {ClientState.NEW},
        ClientEvent.DISCONNECT: {ClientState.CONNECTED},
        ClientEvent.RECONNECT: {ClientState.DISCONNECTED},
        ClientEvent.CLOSE: set(ClientState) - ends,
        ClientEvent.KILL: {ClientState.CONNECTED, ClientState.DISCONNECTED},
    }[event]
    if state in allowed:
        assert next_state(state, event) is not state
    else:
        with pytest.raises(RuntimeError, match=state.name.lower()):
            next_state(state, event)


@in_virtual_time
async def test_routes_follow_changes() -> None:
    world = World("a")
    await world.start()
    bus = world.buses["a"]
    wild, exact = Mailbox(), Mailbox()
    bus.publish("y.z", numbered(0))
    first = bus.subscribe("y.*", InstanceGone, wild)
    bus.publish("y.z", numbered(1))
    second = bus.subscribe("y.z", InstanceGone, exact)
    bus.publish("y.z", numbered(2))
    first.close()
    bus.publish("y.z", numbered(3))
    second.close()
    bus.publish("y.z", numbered(4))
    await world.settle()
    assert wild.numbers == [], "closed while they were under way"
    assert exact.numbers == []
    bus.subscribe("y.z", InstanceGone, exact)
    bus.publish("y.z", numbered(5))
    await world.settle()
    assert exact.numbers == [5]


@in_virtual_time
async def test_routes_are_found_anew_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_network, "ROUTES_MAX", 2)
    world = World("a")
    await world.start()
    mailbox = Mailbox()
    world.buses["a"].subscribe("y.*", InstanceGone, mailbox)
    for number in range(7):
        world.buses["a"].publish(f"y.{number % 5}", numbered(number))
    await world.settle()
    assert mailbox.numbers == list(range(7))


def test_a_network_in_use_stays_on_its_loop() -> None:
    world = World("a", delay_s=10.0)

    async def leave_one_under_way() -> None:
        await world.start()
        world.buses["a"].publish("x", numbered(1))

    virtual_time.run(leave_one_under_way())
    other = MemoryBus(world.network, "b")
    with pytest.raises(RuntimeError, match="another event loop"):
        virtual_time.run(other.start(ServiceInfo(name="tester", instance="b")))


def test_a_handler_that_publishes_without_delay_can_t_hold_the_loop() -> None:
    async def main() -> None:
        world = World("a", delay_s=0.0)
        await world.start()
        bus = world.buses["a"]
        bus.subscribe("y", StatusRequest, lambda message: bus.publish("y", message))
        bus.publish("y", ASK)
        await asyncio.sleep(1.0)

    with pytest.raises(virtual_time.Livelock):
        virtual_time.run(main(), callbacks_per_instant_max=1_000)
