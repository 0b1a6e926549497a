"""What the tests of the simulated mesh are written with."""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from meshift.backends.sim.engine import DEFAULT_MODEL
from meshift.schemas import subjects
from meshift.schemas.base import pack_tokens
from meshift.schemas.identity import FrontendRef, Owner
from meshift.schemas.requests import ReplayReply, ReplayRequest, Sampling, Submit, SubmitReply
from meshift.services.bus.base import ServiceInfo
from meshift.services.bus.memory import MemoryBus
from meshift.services.frontend.api import Chunk, GenerateRequest
from meshift.services.frontend.core import FrontendCore
from meshift.services.simulation import virtual_time
from meshift.services.simulation.chaos_run import check_quiet
from meshift.services.simulation.clients import make_request
from meshift.services.simulation.mesh import MeshOptions, SimulatedMesh
from meshift.services.simulation.workload import Arrival

Scenario = Callable[[SimulatedMesh], Awaitable[None]]
SETTLE_S = 30.0
"""After the last stream, at most: leases, reservations, restarts."""

QUIET_S = 3.0
"""How long it must have been quiet then."""


def play(scenario: Scenario, **options: Any) -> None:
    async def run() -> None:
        mesh = SimulatedMesh(MeshOptions(**({"instances": 2} | options)))
        try:
            await mesh.start()
            await scenario(mesh)
        finally:
            await mesh.stop()

    virtual_time.run(run())


async def settle(
    mesh: SimulatedMesh,
    check: Callable[[SimulatedMesh], Awaitable[None]] = check_quiet,
    settle_s: float = SETTLE_S,
) -> None:
    """Until nothing is left, and a while later still nothing is. Raises AssertionError."""
    loop = asyncio.get_running_loop()
    until_s, is_quiet = loop.time() + settle_s, False
    while not is_quiet and loop.time() < until_s:
        await asyncio.sleep(1.0)
        with contextlib.suppress(AssertionError):
            await check(mesh)
            is_quiet = True
    await asyncio.sleep(QUIET_S)
    await check(mesh)


def request(name: str = "r", inputs: int = 50, outputs: int = 100) -> GenerateRequest:
    return make_request(Arrival(name, 0.0, inputs, outputs), DEFAULT_MODEL.name, random.Random(name))


async def read(frontend: FrontendCore, ask: GenerateRequest) -> list[Chunk]:
    return [chunk async for chunk in await frontend.generate(ask)]


def tokens_of(chunks: list[Chunk]) -> list[int]:
    starts = [chunk.start for chunk in chunks]
    ends = [chunk.start + len(chunk.tokens) for chunk in chunks]
    assert starts == [0, *ends[:-1]], "a gap or a repetition"
    assert chunks[-1].finish is not None
    return [token for chunk in chunks for token in chunk.tokens]


def undisturbed(ask: GenerateRequest) -> list[int]:
    result: list[int] = []

    async def scenario(mesh: SimulatedMesh) -> None:
        result.extend(tokens_of(await read(mesh.frontends["frontend-0"], ask)))

    play(scenario)
    return result


@dataclass
class Pending:
    """Streams that are being read."""

    asks: list[GenerateRequest]
    tasks: "list[asyncio.Task[list[Chunk]]]"

    async def all_exact(self) -> None:
        for ask, task in zip(self.asks, self.tasks, strict=True):
            assert tokens_of(await task) == expected(ask), ask.request_id


references: dict[str, list[int]] = {}


def expected(ask: GenerateRequest) -> list[int]:
    return references[ask.request_id]


def streams(mesh: SimulatedMesh, asks: list[GenerateRequest]) -> Pending:
    frontend = mesh.frontends["frontend-0"]
    return Pending(asks, [asyncio.get_running_loop().create_task(read(frontend, ask)) for ask in asks])


def eight() -> list[GenerateRequest]:
    asks = [request(f"r{index}") for index in range(8)]
    for ask in asks:
        if ask.request_id not in references:
            references[ask.request_id] = undisturbed(ask)
    return asks


async def outsider(mesh: SimulatedMesh) -> MemoryBus:
    bus = MemoryBus(mesh.network, "outsider")
    await bus.start(ServiceInfo("test", "outsider"))
    return bus


def submission(owner: Owner) -> Submit:
    frontend = FrontendRef("outsider", 1)
    prompt = pack_tokens([5, 6, 7])
    return Submit(
        request_id="x", attempt=1, owner=owner, frontend=frontend, prompt=prompt, sampling=Sampling(max_new_tokens=50)
    )


def ask_for_tokens(owner: Owner) -> ReplayRequest:
    return ReplayRequest(request_id="x", attempt=1, hop=0, owner=owner, start=0)


async def tell(bus: MemoryBus, message: Submit | ReplayRequest) -> None:
    name = message.owner.instance_id
    if isinstance(message, Submit):
        await bus.request(subjects.worker_submit(name), message, SubmitReply, timeout_s=1.0)
    else:
        await bus.request(subjects.worker_replay(name), message, ReplayReply, timeout_s=1.0)
