"""`priority` of a REST request, end to end on real engines: its place in SGLang's queue, and the headroom of its class
in what the worker reports."""

import contextlib
import random
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from meshift.benchmarks.mesh_process import MeshProcess
from meshift.benchmarks.move_mesh import MeshStream, MoveMesh
from meshift.client.mesh import MeshClient
from meshift.schemas import subjects
from meshift.schemas.admin import OpenRequest
from meshift.schemas.instances import LoadReport
from meshift.schemas.memory import MemoryBody
from meshift.services.cli.client import joined_bus
from meshift.services.cli.model import SMALL_MODEL
from meshift.services.worker.policy.virtual_usage import VirtualUsageSettings
from tests.support.moving_mesh import until, until_quiet, until_ready

pytestmark = [
    pytest.mark.soak,
    pytest.mark.sglang,
    pytest.mark.nats,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="session"),
]

WORKERS = ("worker-1", "worker-2")
SEED = 4
DEADLINE_S = 90.0
CAPACITY = 2048
FILLER_TOKENS, FILLER_OUTPUT = 900, 1100
"""Beside it, what waits never fits, however much of it has been generated."""
WAITER_TOKENS, WAITER_OUTPUT = 700, 4
HIGH_OUTPUT = 60
HIGH = VirtualUsageSettings().classes[0]


@pytest_asyncio.fixture(loop_scope="session")
async def queueing(sglang_mesh: MeshProcess, sglang_admin: MeshClient) -> AsyncIterator[MeshClient]:
    """The shared mesh, small, where what has no room queues at its instance and nothing moves; as before afterwards."""
    await until_ready(sglang_admin, len(WORKERS))
    before = {name: (await sglang_admin.memory(name)).capacity for name in WORKERS}
    await sglang_admin.change_policy({"dispatch": {"hold": False}, "migration": {"enabled": False}})
    try:
        for name in WORKERS:
            assert (await sglang_admin.resize_memory(name, MemoryBody(capacity=CAPACITY))).capacity == CAPACITY
        yield sglang_admin
    finally:
        await sglang_admin.change_policy({"dispatch": {"hold": True}, "migration": {"enabled": True}})
        for name, capacity in before.items():
            await sglang_admin.resize_memory(name, MemoryBody(capacity=capacity))


async def open_by_name(admin: MeshClient) -> dict[str, OpenRequest]:
    """The client's name of each -> the request, as its frontend knows it."""
    return {item.request_id.rpartition("-")[0]: item for item in await admin.open_requests()}


async def test_a_high_request_overtakes_those_that_queue_and_has_headroom(
    sglang_mesh: MeshProcess, sglang_rest: httpx.AsyncClient, queueing: MeshClient
) -> None:
    rng = random.Random(SEED)
    print(f"seed {SEED}")

    def prompt(tokens: int) -> list[int]:
        return rng.choices(range(100, 40_000), k=tokens)

    headrooms: list[LoadReport] = []
    async with joined_bus(sglang_mesh.state().nats_url) as bus, contextlib.AsyncExitStack() as stack:
        bus.subscribe(subjects.LOAD, LoadReport, lambda report: headrooms.append(report) if report.headroom else None)
        mesh = MoveMesh(sglang_rest, bus, SMALL_MODEL)
        await mesh.join(WORKERS)

        def begin(name: str, tokens: int, output: int, priority: int = 0) -> MeshStream:
            stream = mesh.open(name, prompt(tokens), output, priority)
            stack.push_async_callback(mesh.close, stream)
            return stream

        fillers = [begin(f"filler-{number}", FILLER_TOKENS, FILLER_OUTPUT) for number in range(2)]
        for filler in fillers:
            await mesh.until_tokens(filler, 1)
        assert {filler.instance for filler in fillers} == set(WORKERS)
        normals = [begin(f"normal-{number}", WAITER_TOKENS, WAITER_OUTPUT) for number in range(4)]
        await waiting(queueing, 4)
        high = begin("high", WAITER_TOKENS, HIGH_OUTPUT, priority=1)
        await waiting(queueing, 5)

        known = await open_by_name(queueing)
        assert (known["high"].priority.scheduling, known["high"].priority.execution) == (1, 1)
        owner = known["high"].owner
        rivals = [stream for stream in normals if known[stream.name].owner == owner]
        assert owner is not None
        assert rivals, "both queues have normal ones"
        for filler in fillers:
            await mesh.close(filler)
        for stream, output in ((high, HIGH_OUTPUT), *((rival, WAITER_OUTPUT) for rival in rivals)):
            await mesh.until_tokens(stream, output)
        assert high.steps[0].emitted_ns < min(rival.steps[0].emitted_ns for rival in rivals)
        for stream in (high, *normals):
            await mesh.finish(stream)
    await until_quiet(queueing)
    assert {report.owner for report in headrooms} == {owner}
    assert {report.headroom for report in headrooms} == {CAPACITY - (HIGH.target_load or 0)}
    assert all(report.classes[0].name == HIGH.name and report.classes[0].running == 1 for report in headrooms)


async def waiting(admin: MeshClient, count: int) -> None:
    """So many wait in the engines' queues, and every instance runs its filler."""

    async def queued() -> bool:
        loads = [item.load for item in await admin.instances()]
        return sum(load.waiting for load in loads) == count and all(load.running == 1 for load in loads)

    await until(queued, f"{count} that wait", DEADLINE_S)
