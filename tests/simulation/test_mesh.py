"""The simulated mesh at work: spreading, streams, cancels, refusals."""

import asyncio

import pytest

from meshift.backends.sim.engine import DEFAULT_MODEL
from meshift.backends.sim.parameters import SimParameters
from meshift.schemas.errors import (
    ContextTooLong,
    InvalidRequest,
    MessageTooLarge,
    NotFound,
    Overloaded,
    Unavailable,
)
from meshift.schemas.instances import InstanceState
from meshift.schemas.requests import Sampling
from meshift.services.frontend.api import GenerateRequest
from meshift.services.simulation.chaos_run import check_quiet
from meshift.services.simulation.mesh import SimulatedMesh
from meshift.services.worker.core import WorkerCore
from meshift.services.worker.options import WorkerOptions
from tests.support.mesh_kit import (
    eight,
    expected,
    outsider,
    play,
    references,
    request,
    settle,
    streams,
    submission,
    tell,
    tokens_of,
    undisturbed,
)


def test_requests_spread_over_the_instances() -> None:
    asks = eight()

    async def scenario(mesh: SimulatedMesh) -> None:
        pending = streams(mesh, asks)
        await asyncio.sleep(1.0)
        assert [node.engine.load().running for node in mesh.workers.values()] == [4, 4]
        await pending.all_exact()
        await settle(mesh)

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
            assert tokens_of([chunk async for chunk in handle]) == expected(ask)
            assert handle.stream.attempt == 1
        assert await core.ended is InstanceState.STOPPED

    async def refused_submission(mesh: SimulatedMesh, core: WorkerCore) -> None:
        frontend = mesh.frontends["frontend-0"]
        other = mesh.workers["worker-1"].core
        other.drain(60.0)
        await asyncio.sleep(0.5)
        await frontend.generate(request("late"))

    play(scenario, restart_delay_s=100.0)


def test_lost_token_messages_are_asked_for() -> None:
    asks = eight()

    async def scenario(mesh: SimulatedMesh) -> None:
        mesh.faults.set(drop=0.3, link=lambda sender, receiver, subject: ".tokens" in subject)
        handles = [await mesh.frontends["frontend-0"].generate(ask) for ask in asks]
        for ask, handle in zip(asks, handles, strict=True):
            assert tokens_of([chunk async for chunk in handle]) == expected(ask)
            assert handle.stream.attempt == 1, "what the owner still has need not be generated again"
        mesh.faults.set()
        await settle(mesh)

    play(scenario)


def test_a_lost_answer_to_a_submission_needs_no_other_owner() -> None:
    asks = eight()

    async def scenario(mesh: SimulatedMesh) -> None:
        def answers(sender: str, _receiver: str, subject: str) -> bool:
            return sender.startswith("worker") and subject.endswith(".submit")

        mesh.faults.set(drop=1.0, link=answers)
        handles = await asyncio.gather(*(mesh.frontends["frontend-0"].generate(ask) for ask in asks))
        for ask, handle in zip(asks, handles, strict=True):
            assert tokens_of([chunk async for chunk in handle]) == expected(ask)
            assert handle.stream.attempt == 1, "its tokens say that the owner has it"

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


def test_a_preempted_request_is_exact() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        await streams(mesh, asks).all_exact()

    asks = [request(f"p{index}", inputs=80, outputs=120) for index in range(8)]
    for ask in asks:
        references[ask.request_id] = undisturbed(ask)
    play(scenario, instances=1, parameters=SimParameters(capacity=800))


def test_a_repeated_submission_runs_once() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        core = mesh.workers["worker-0"].core
        bus = await outsider(mesh)
        for _ in range(3):
            await tell(bus, submission(owner=core.owner))
        assert core.open_requests() == 1
        load = mesh.workers["worker-0"].engine.load()
        assert load.running + load.waiting == 1

    play(scenario)
