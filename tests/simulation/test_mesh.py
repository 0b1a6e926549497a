"""One fault at a time, on the simulated mesh: what each service does about it, and how soon."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from meshift.backends.sim.engine import DEFAULT_MODEL
from meshift.backends.sim.parameters import SimParameters
from meshift.schemas.errors import ContextTooLong, InvalidRequest, MessageTooLarge, NotFound, Overloaded, Unavailable
from meshift.schemas.instances import InstanceState
from meshift.schemas.requests import Sampling
from meshift.services.frontend.api import Chunk, GenerateRequest
from meshift.services.frontend.core import FrontendCore, FrontendOptions
from meshift.services.simulation import virtual_time
from meshift.services.simulation.chaos_run import check_quiet
from meshift.services.simulation.clients import make_request
from meshift.services.simulation.mesh import MeshOptions, SimulatedMesh
from meshift.services.simulation.workload import Arrival
from meshift.services.worker.core import WorkerCore, WorkerOptions

Scenario = Callable[[SimulatedMesh], Awaitable[None]]
SETTLE_S = 30.0


def play(scenario: Scenario, **options: Any) -> None:
    async def run() -> None:
        mesh = SimulatedMesh(MeshOptions(**({"instances": 2} | options)))
        try:
            await mesh.start()
            await scenario(mesh)
        finally:
            await mesh.stop()

    virtual_time.run(run())


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
            assert tokens_of(await task) == undisturbed_cache(ask), ask.request_id


_references: dict[str, list[int]] = {}


def undisturbed_cache(ask: GenerateRequest) -> list[int]:
    return _references[ask.request_id]


def streams(mesh: SimulatedMesh, asks: list[GenerateRequest]) -> Pending:
    frontend = mesh.frontends["frontend-0"]
    return Pending(asks, [asyncio.get_running_loop().create_task(read(frontend, ask)) for ask in asks])


def eight() -> list[GenerateRequest]:
    asks = [request(f"r{index}") for index in range(8)]
    for ask in asks:
        if ask.request_id not in _references:
            _references[ask.request_id] = undisturbed(ask)
    return asks


def test_requests_spread_over_the_instances() -> None:
    asks = eight()

    async def scenario(mesh: SimulatedMesh) -> None:
        pending = streams(mesh, asks)
        await asyncio.sleep(1.0)
        assert [node.engine.load().running for node in mesh.workers.values()] == [4, 4]
        await pending.all_exact()
        await asyncio.sleep(SETTLE_S)
        await check_quiet(mesh)

    play(scenario)


@pytest.mark.parametrize("how", ["kill", "crash", "hang", "drain"])
def test_a_lost_instance_loses_no_stream(how: str) -> None:
    asks = eight()

    async def scenario(mesh: SimulatedMesh) -> None:
        pending = streams(mesh, asks)
        await asyncio.sleep(1.0)
        node = mesh.workers["worker-0"]
        if how == "kill":
            await mesh.kill_worker("worker-0")
        elif how == "crash":
            node.engine.crash("test")
        elif how == "hang":
            node.engine.hang()
        else:
            node.core.drain(0.5)
        await pending.all_exact()
        await asyncio.sleep(SETTLE_S)
        await check_quiet(mesh)
        assert mesh.workers["worker-0"].core.owner.incarnation > node.core.owner.incarnation

    play(scenario, worker=WorkerOptions(engine_stall_s=3.0))


def test_a_killed_worker_is_noticed_within_a_second() -> None:
    asks = eight()

    async def scenario(mesh: SimulatedMesh) -> None:
        handle = await mesh.frontends["frontend-0"].generate(asks[0])
        await asyncio.sleep(1.0)
        owner = handle.stream.owner
        assert owner is not None
        await mesh.kill_worker(owner.instance_id)
        killed_s = asyncio.get_running_loop().time()
        while handle.stream.attempt == 1:
            await asyncio.sleep(0.01)
        assert asyncio.get_running_loop().time() - killed_s < 1.0
        assert tokens_of([chunk async for chunk in handle]) == undisturbed_cache(asks[0])

    play(scenario)


def test_a_drain_with_time_enough_resumes_nothing() -> None:
    asks = eight()

    async def scenario(mesh: SimulatedMesh) -> None:
        handles = [await mesh.frontends["frontend-0"].generate(ask) for ask in asks]
        await asyncio.sleep(1.0)
        core = mesh.workers["worker-0"].core
        assert core.drain(60.0) == 4
        with pytest.raises(Unavailable):
            await refused_submission(mesh, core)
        for ask, handle in zip(asks, handles, strict=True):
            assert tokens_of([chunk async for chunk in handle]) == undisturbed_cache(ask)
            assert handle.stream.attempt == 1
        assert await core.ended is InstanceState.STOPPED

    async def refused_submission(mesh: SimulatedMesh, core: WorkerCore) -> None:
        frontend = mesh.frontends["frontend-0"]
        other = mesh.workers["worker-1"].core
        other.drain(60.0)
        await asyncio.sleep(0.5)
        await frontend.generate(request("late"))

    play(scenario, restart_delay_s=100.0)


def test_without_a_scheduler_requests_go_on() -> None:
    asks = eight()

    async def scenario(mesh: SimulatedMesh) -> None:
        frontend = mesh.frontends["frontend-0"]
        running = streams(mesh, asks[:4])
        await asyncio.sleep(0.5)
        assert frontend.scheduler_alive()
        await mesh.kill_scheduler()
        more = streams(mesh, asks[4:])
        await asyncio.sleep(0.5)
        assert not frontend.scheduler_alive()
        assert all(node.engine.load().running == 4 for node in mesh.workers.values()), "round-robin"
        await mesh.start_scheduler()
        await asyncio.sleep(0.6)
        assert frontend.scheduler_alive()
        await running.all_exact()
        await more.all_exact()

    play(scenario)


def test_lost_token_messages_are_asked_for() -> None:
    asks = eight()

    async def scenario(mesh: SimulatedMesh) -> None:
        mesh.faults.set(drop=0.3, link=lambda sender, receiver, subject: ".tokens" in subject)
        handles = [await mesh.frontends["frontend-0"].generate(ask) for ask in asks]
        for ask, handle in zip(asks, handles, strict=True):
            assert tokens_of([chunk async for chunk in handle]) == undisturbed_cache(ask)
            assert handle.stream.attempt == 1, "what the owner still has need not be generated again"
        mesh.faults.set()
        await asyncio.sleep(SETTLE_S)
        await check_quiet(mesh)

    play(scenario)


def test_lost_acknowledgements_are_asked_for() -> None:
    asks = eight()

    async def scenario(mesh: SimulatedMesh) -> None:
        mesh.faults.set(drop=1.0, link=lambda sender, receiver, subject: subject.endswith(".ack"))
        await streams(mesh, asks).all_exact()
        assert sum(node.core.open_requests() for node in mesh.workers.values()) == 8
        mesh.faults.set()
        await asyncio.sleep(2.0)
        await check_quiet(mesh)

    play(scenario)


def test_a_cancelled_request_frees_its_memory_at_once() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        frontend = mesh.frontends["frontend-0"]
        handle = await frontend.generate(request("r", outputs=2000))
        await asyncio.sleep(1.0)
        assert sum(node.engine.load().used for node in mesh.workers.values()) > 0
        await handle.cancel()
        await handle.cancel()
        await asyncio.sleep(0.2)
        assert [chunk.finish async for chunk in handle][-1:] in ([], [None])
        await check_quiet(mesh)

    play(scenario)


def test_a_lost_cancel_is_sent_again() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        handle = await mesh.frontends["frontend-0"].generate(request("r", outputs=2000))
        await asyncio.sleep(1.0)
        mesh.faults.set(drop=1.0, link=lambda sender, receiver, subject: subject.endswith(".cancel"))
        await handle.cancel()
        mesh.faults.set()
        await asyncio.sleep(0.5)
        await check_quiet(mesh)

    play(scenario)


def test_a_dead_frontends_requests_end_with_its_lease() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        for index in range(4):
            await mesh.frontends["frontend-0"].generate(request(f"r{index}", outputs=3000))
        await asyncio.sleep(1.0)
        await mesh.kill_frontend("frontend-0")
        await asyncio.sleep(FrontendOptions().lease_ttl_s + 0.5)
        for node in mesh.workers.values():
            assert node.engine.load().used == 0
            assert node.core.open_requests() == 0

    play(scenario)


def test_a_restarted_frontend_ends_its_predecessors_requests_sooner() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        for index in range(4):
            await mesh.frontends["frontend-0"].generate(request(f"r{index}", outputs=3000))
        await asyncio.sleep(1.0)
        await mesh.kill_frontend("frontend-0")
        await mesh.start_frontend("frontend-0")
        await asyncio.sleep(0.5)
        assert all(node.engine.load().used == 0 for node in mesh.workers.values())

    play(scenario)


def test_an_owner_that_was_cut_off_stops_when_it_is_heard_again() -> None:
    asks = eight()

    async def scenario(mesh: SimulatedMesh) -> None:
        frontend = mesh.frontends["frontend-0"]
        handles = [await frontend.generate(ask) for ask in asks]
        await asyncio.sleep(0.5)
        cut = mesh.faults.partition(["worker-0"], ["frontend-0", "scheduler"])
        for ask, handle in zip(asks, handles, strict=True):
            assert tokens_of([chunk async for chunk in handle]) == undisturbed_cache(ask)
        resumed = [handle for handle in handles if handle.stream.attempt > 1]
        assert len(resumed) == 4
        assert all(handle.stream.owner == mesh.workers["worker-1"].core.owner for handle in resumed)
        mesh.faults.heal(cut)
        await asyncio.sleep(SETTLE_S)
        await check_quiet(mesh)

    play(scenario)


def test_of_two_incarnations_the_newest_wins() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        old = mesh.workers["worker-0"]
        await mesh.start_worker("worker-0", bus_name="worker-0-twin")
        assert await asyncio.wait_for(old.core.ended, 1.0) is InstanceState.STOPPED

    play(scenario, restart_delay_s=1000.0)


def test_what_cannot_be_served_says_why() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        frontend = mesh.frontends["frontend-0"]
        sampling = Sampling(max_new_tokens=10)
        with pytest.raises(NotFound, match="there is sim") as unknown:
            await frontend.generate(GenerateRequest("a", "other", [5], sampling))
        assert unknown.value.param == "model"
        with pytest.raises(InvalidRequest):
            await frontend.generate(GenerateRequest("b", DEFAULT_MODEL.name, [], sampling))
        with pytest.raises(ContextTooLong):
            await frontend.generate(GenerateRequest("c", DEFAULT_MODEL.name, [5] * 20_000, sampling))
        with pytest.raises(MessageTooLarge):
            await frontend.generate(GenerateRequest("d", DEFAULT_MODEL.name, [5] * 3_000_000, sampling))
        assert frontend.open_streams() == 0
        await check_quiet(mesh)

    play(scenario)


def test_no_instance_is_said_at_once() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        loop = asyncio.get_running_loop()
        for name in mesh.worker_names:
            await mesh.kill_worker(name)
        await asyncio.sleep(3.0)
        begin_s = loop.time()
        with pytest.raises(Unavailable):
            await mesh.frontends["frontend-0"].generate(request())
        assert loop.time() - begin_s < 0.1
        assert not mesh.frontends["frontend-0"].ready()

    play(scenario, restart_delay_s=1000.0)


def test_a_full_mesh_says_that_it_is_full() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        frontend = mesh.frontends["frontend-0"]
        for index in range(4):
            await frontend.generate(request(f"r{index}", outputs=3000))
        with pytest.raises(Overloaded):
            await frontend.generate(request("one more"))
        assert frontend.open_streams() == 4

    play(scenario, worker=WorkerOptions(requests_max=2))


def test_a_stream_waits_for_an_instance_to_come_back() -> None:
    asks = eight()

    async def scenario(mesh: SimulatedMesh) -> None:
        pending = streams(mesh, asks)
        await asyncio.sleep(1.0)
        for name in mesh.worker_names:
            await mesh.kill_worker(name)
        await pending.all_exact()

    play(scenario, restart_delay_s=20.0)


def test_a_stream_that_nobody_takes_fails_by_its_deadline() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        handle = await mesh.frontends["frontend-0"].generate(request())
        await asyncio.sleep(0.5)
        for name in mesh.worker_names:
            await mesh.kill_worker(name)
        with pytest.raises(Unavailable):
            async for _ in handle:
                pass
        assert mesh.frontends["frontend-0"].open_streams() == 0

    play(scenario, restart_delay_s=1000.0, frontend=FrontendOptions(resume_deadline_s=5.0))


def test_a_preempted_request_is_exact() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        await streams(mesh, asks).all_exact()

    asks = [request(f"p{index}", inputs=80, outputs=120) for index in range(8)]
    for ask in asks:
        _references[ask.request_id] = undisturbed(ask)
    play(scenario, instances=1, parameters=SimParameters(capacity=800))


def test_a_restarted_instance_is_someone_else() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        frontend = mesh.frontends["frontend-0"]
        old = mesh.workers["worker-0"].core.owner
        await mesh.kill_worker("worker-0")
        await asyncio.sleep(3.0)
        new = mesh.workers["worker-0"].core.owner
        assert new > old
        assert new in [report.owner for report in frontend.instances()]
        assert old not in [report.owner for report in frontend.instances()]

    play(scenario, restart_delay_s=0.5)
