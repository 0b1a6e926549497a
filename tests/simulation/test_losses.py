"""Something dies, hangs, or is cut off: what the mesh does about it, and how soon."""

import asyncio

import pytest

from meshift.schemas import subjects
from meshift.schemas.errors import (
    Stale,
    Unavailable,
)
from meshift.schemas.identity import FrontendRef
from meshift.schemas.instances import InstanceState
from meshift.schemas.requests import Cancel
from meshift.services.frontend.core import FrontendOptions
from meshift.services.simulation.mesh import SimulatedMesh
from meshift.services.worker.options import WorkerOptions
from tests.support.mesh_kit import (
    ask_for_tokens,
    eight,
    expected,
    outsider,
    play,
    request,
    settle,
    streams,
    submission,
    tell,
    tokens_of,
)


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
        await settle(mesh)
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
        assert tokens_of([chunk async for chunk in handle]) == expected(asks[0])

    play(scenario)


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
            assert tokens_of([chunk async for chunk in handle]) == expected(ask)
        resumed = [handle for handle in handles if handle.stream.attempt > 1]
        assert len(resumed) == 4
        assert all(handle.stream.owner == mesh.workers["worker-1"].core.owner for handle in resumed)
        mesh.faults.heal(cut)
        await settle(mesh)

    play(scenario)


def test_of_two_incarnations_the_newest_wins() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        old = mesh.workers["worker-0"]
        await mesh.start_worker("worker-0", bus_name="worker-0-twin")
        assert await asyncio.wait_for(old.core.ended, 1.0) is InstanceState.STOPPED

    play(scenario, restart_delay_s=1000.0)


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


def test_a_restarted_instance_is_someone_else() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        frontend = mesh.frontends["frontend-0"]
        old = mesh.workers["worker-0"].core.owner
        await mesh.kill_worker("worker-0")
        await asyncio.sleep(3.0)
        new = mesh.workers["worker-0"].core.owner
        known = [report.owner for report in frontend.instances()]
        assert new > old
        assert new in known
        assert old not in known
        bus = await outsider(mesh)
        for message in (submission(owner=old), ask_for_tokens(old)):
            with pytest.raises(Stale):
                await tell(bus, message)
        await tell(bus, submission(owner=new))

    play(scenario, restart_delay_s=0.5)


def test_a_request_that_its_owner_does_not_know_goes_on_elsewhere() -> None:
    asks = eight()

    async def scenario(mesh: SimulatedMesh) -> None:
        handle = await mesh.frontends["frontend-0"].generate(asks[0])
        await asyncio.sleep(1.0)
        owner = handle.stream.owner
        assert owner is not None
        mistaken = Cancel(frontend=FrontendRef("frontend-0", 0), owner=owner, keys=(handle.stream.key,))
        (await outsider(mesh)).publish(subjects.worker_cancel(owner.instance_id), mistaken)
        assert tokens_of([chunk async for chunk in handle]) == expected(asks[0])
        assert handle.stream.attempt == 2

    play(scenario)
