"""A small world on a memory bus."""

import asyncio
import functools
import random
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from meshift.schemas.instances import DispatchRequest, InstanceGone
from meshift.schemas.requests import SubmitReply
from meshift.services.bus.base import ServiceInfo
from meshift.services.bus.memory import MemoryBus, MemoryNetwork
from meshift.services.simulation import virtual_time
from tests.contract.bus_kit import REPLY, dispatch_request

SEED = 20260


class World:
    """A network, and what its clients got, in order."""

    def __init__(self, *names: str, seed: int = SEED, delay_s: float = 0.001, **options: Any) -> None:
        print(f"seed {seed}")
        self.network = MemoryNetwork(random.Random(seed), delay_s=delay_s, **options)
        self.buses = {name: MemoryBus(self.network, name) for name in names}
        self.log: list[tuple[float, str, int]] = []

    async def start(self) -> None:
        """All clients; each takes what is published on `x`, and serves `ask.<name>`."""
        for name, bus in self.buses.items():
            bus.subscribe("x", InstanceGone, partial(self._note, name))
            bus.serve("ask", f"ask.{name}", DispatchRequest, partial(self._serve, name))
            await bus.start(ServiceInfo(name="tester", instance=name))

    def _note(self, name: str, message: InstanceGone) -> None:
        self.log.append((asyncio.get_running_loop().time(), name, int(message.reason)))

    def _serve(self, name: str, message: DispatchRequest) -> SubmitReply:
        self.log.append((asyncio.get_running_loop().time(), name, message.demand))
        return REPLY

    async def settle(self) -> None:
        """Let all that is under way arrive."""
        await asyncio.sleep(1.0)

    def got(self, name: str) -> list[int]:
        """What `name` got, in order."""
        return [number for _, receiver, number in self.log if receiver == name]

    async def ask(self, sender: str, receiver: str, *, timeout_s: float = 0.1, number: int = 1) -> SubmitReply:
        """A request between two."""
        request = dispatch_request(demand=number)
        return await self.buses[sender].request(f"ask.{receiver}", request, SubmitReply, timeout_s=timeout_s)


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in virtual time."""

    @functools.wraps(test)
    def run_test(*args: Any, **kwargs: Any) -> None:
        virtual_time.run(test(*args, **kwargs))

    return run_test
