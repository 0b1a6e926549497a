"""What operators ask of frontends, in a simulated mesh."""

import asyncio

import pytest

from meshift.schemas.admin import DrainBody, MoveBody
from meshift.schemas.errors import MoveDeclined, NotFound
from meshift.schemas.instances import InstanceState
from meshift.schemas.memory import MemoryBody
from meshift.schemas.moves import MoveMode, MoveOutcome
from meshift.services.frontend.operators import Operators
from meshift.services.simulation.mesh import SimulatedMesh
from tests.support.mesh_kit import eight, play, read, request, settle, streams, tokens_of, undisturbed
from tests.support.move_kit import record_of, running, until


def operators(mesh: SimulatedMesh, frontend: str = "frontend-0") -> Operators:
    return mesh.frontends[frontend].operators


async def ask_through(mesh: SimulatedMesh, frontend: str, *names: str) -> "list[asyncio.Task[list[int]]]":
    """Read requests that a frontend has."""

    async def tokens(name: str) -> list[int]:
        return tokens_of(await read(mesh.frontends[frontend], request(name)))

    tasks = [asyncio.get_running_loop().create_task(tokens(name)) for name in names]
    for name in names:
        await running(mesh, name)
    return tasks


@pytest.mark.parametrize("asked", ["frontend-0", "frontend-1"])
def test_requests_of_all_frontends_are_listed_until_they_end(asked: str) -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        tasks = [*await ask_through(mesh, "frontend-0", "a", "b"), *await ask_through(mesh, "frontend-1", "c")]
        seen = await operators(mesh, asked).requests()
        assert {(item.request_id, item.frontend.frontend_id) for item in seen.data} == {
            ("a", "frontend-0"),
            ("b", "frontend-0"),
            ("c", "frontend-1"),
        }
        assert (seen.total, seen.unanswered) == (3, ())
        for item in seen.data:
            assert (item.state, item.attempt, item.hop, item.prompt_tokens) == ("running", 1, 0, 50)
            assert item.owner is not None
            assert item.output_tokens > 0
        await asyncio.gather(*tasks)
        await settle(mesh)
        assert (await operators(mesh, asked).requests()).data == ()

    play(scenario, frontends=2)


def test_a_frontend_that_has_just_started_knows_the_others_requests() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        tasks = await ask_through(mesh, "frontend-0", "a")
        await mesh.start_frontend("frontend-9")
        seen = await operators(mesh, "frontend-9").requests()
        assert [item.request_id for item in seen.data] == ["a"]
        await asyncio.gather(*tasks)

    play(scenario)


def test_a_frontend_that_is_gone_or_silent() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        tasks = await ask_through(mesh, "frontend-0", "a")
        await mesh.kill_frontend("frontend-2")
        mesh.faults.partition({"frontend-1"}, {"frontend-0"})
        seen = await operators(mesh).requests()
        assert [item.request_id for item in seen.data] == ["a"]
        assert seen.unanswered == ("frontend-1",)
        await asyncio.gather(*tasks)

    play(scenario, frontends=3)


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("asked", ["frontend-0", "frontend-1"])
@pytest.mark.parametrize("mode", MoveMode)
def test_a_request_of_any_frontend_is_moved(mode: MoveMode, asked: str, wait: bool) -> None:
    whole = undisturbed(request("a"))

    async def scenario(mesh: SimulatedMesh) -> None:
        tasks = await ask_through(mesh, "frontend-1", "a")
        node, _ = await running(mesh, "a", 10)
        source = node.core.owner.instance_id
        destination = {"worker-0": "worker-1", "worker-1": "worker-0"}[source]
        report = await operators(mesh, asked).move("a", MoveBody(destination=destination, mode=mode, wait=wait))
        assert report.source == node.core.owner
        if wait:
            assert report.outcome is MoveOutcome.MOVED
            assert (report.figures.frozen_ns > 0) == (mode is not MoveMode.RECOMPUTE), "there is nothing to run yet"
        else:
            assert report.outcome is None
            assert report.phase
        await until(lambda: (found := record_of(mesh, "a")) is not None and found[0] is not node, "the move")
        listed = await operators(mesh, asked).moves()
        (ended,) = [report for reply in listed.data for report in reply.ended]
        assert (ended.request_id, ended.outcome, listed.unanswered) == ("a", MoveOutcome.MOVED, ())
        assert await tasks[0] == whole

    play(scenario, frontends=2)


def test_moves_that_do_not_begin() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        tasks = await ask_through(mesh, "frontend-0", "a")
        node, _ = await running(mesh, "a", 10)
        ask = operators(mesh)
        with pytest.raises(NotFound, match="no open request 'x'") as unknown:
            await ask.move("x", MoveBody())
        assert unknown.value.param == "request_id"
        with pytest.raises(NotFound, match="no instance 'worker-9'") as nowhere:
            await ask.move("a", MoveBody(destination="worker-9"))
        assert nowhere.value.param == "destination"
        first = await ask.move("a", MoveBody())
        assert first.outcome is None
        with pytest.raises(MoveDeclined, match="it moves already") as busy:
            await ask.move("a", MoveBody())
        assert (busy.value.refusal, busy.value.param) == ("busy", "request_id")
        await until(lambda: (found := record_of(mesh, "a")) is not None and found[0] is not node, "the move")
        there = record_of(mesh, "a")
        assert there is not None
        with pytest.raises(MoveDeclined, match="it is there already") as same:
            await ask.move("a", MoveBody(destination=there[0].core.owner.instance_id, wait=True))
        assert (same.value.refusal, same.value.param) == ("incompatible", "destination")
        await asyncio.gather(*tasks)

    play(scenario)


def test_a_request_without_an_owner() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        (task,) = await ask_through(mesh, "frontend-0", "a")
        await mesh.kill_worker("worker-0")
        ask = operators(mesh)
        await until(lambda: mesh.frontends["frontend-0"].counters.resumes > 0, "the loss")
        with pytest.raises(MoveDeclined, match="no instance has a now") as lost:
            await ask.move("a", MoveBody())
        assert lost.value.refusal == "busy"
        task.cancel()

    play(scenario, instances=1)


def test_instances_tell_of_their_moves_and_their_drain() -> None:
    asks = eight()

    async def scenario(mesh: SimulatedMesh) -> None:
        pending = streams(mesh, asks)
        for ask in asks:
            await running(mesh, ask.request_id)
        before = (await operators(mesh).instances()).data
        assert [item.load.owner.instance_id for item in before] == ["worker-0", "worker-1"]
        assert all(item.answers and item.engine == "sim" and item.drain is None for item in before)
        assert sum(item.requests for item in before) == 8
        reply = await operators(mesh).drain("worker-0", DrainBody(deadline_s=None))
        assert reply.requests_left == before[0].requests
        await asyncio.sleep(0.15)
        drained, other = (await operators(mesh).instances()).data
        assert drained.load.state is InstanceState.DRAINING
        assert drained.drain is not None
        assert drained.moves_out == drained.drain.moving > 0
        assert other.moves_in == drained.moves_out
        await until(lambda: mesh.workers["worker-0"].core.owner != before[0].load.owner, "the next worker-0")
        await pending.all_exact()
        assert mesh.frontends["frontend-0"].counters.resumes == 0

    play(scenario)


def test_a_drain_without_anywhere_to_go_is_blocked_until_it_is_forced() -> None:
    whole = undisturbed(request("a"))

    async def scenario(mesh: SimulatedMesh) -> None:
        (task,) = await ask_through(mesh, "frontend-0", "a")
        owner = mesh.workers["worker-0"].core.owner
        await operators(mesh).drain("worker-0", DrainBody(deadline_s=None, restart=True))
        await asyncio.sleep(1.0)
        (status,) = (await operators(mesh).instances()).data
        assert status.drain is not None
        assert (status.drain.left, status.drain.moved) == (1, 0)
        assert "no_destination" in status.drain.blocked
        assert mesh.workers["worker-0"].core.restart_wanted
        await operators(mesh).drain("worker-0", DrainBody(force=True))
        await until(lambda: mesh.workers["worker-0"].core.owner != owner, "the next worker-0")
        assert await task == whole

    play(scenario, instances=1)


def test_a_silent_instance_is_listed_all_the_same() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        mesh.faults.partition({"frontend-0"}, {"worker-1"})
        first, second = (await operators(mesh).instances()).data
        assert (first.answers, second.answers) == (True, False)
        assert (await operators(mesh).moves()).unanswered == ("worker-1",)

    play(scenario)


def test_drains_of_nobody() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        for name in ("worker-9", "no.such*name"):
            with pytest.raises(NotFound, match="there is no instance") as unknown:
                await operators(mesh).drain(name, DrainBody())
            assert unknown.value.param == "instance_id"

    play(scenario)


def test_an_instance_is_asked_for_another_capacity_through_a_frontend() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        ask = operators(mesh)
        told = await ask.memory("worker-0")
        assert told.owner == mesh.workers["worker-0"].core.owner
        assert told.used + told.cached + told.free + told.reserved == told.capacity > 0
        assert told.units is None
        half = await ask.resize_memory("worker-0", MemoryBody(capacity=told.capacity // 2))
        assert half.capacity == told.capacity // 2 // told.page_tokens * told.page_tokens
        assert (half.released_bytes, half.reason) == ((told.resident_bytes or 0) - (half.resident_bytes or 0), "")
        assert half.released_bytes > 0
        again = await ask.resize_memory("worker-0", MemoryBody(capacity=told.capacity + 64))
        assert (again.capacity, again.reason) == (told.capacity, "the engine was started with no more room")
        for name in ("worker-9", "no.such*name"):
            with pytest.raises(NotFound, match="there is no instance"):
                await ask.resize_memory(name, MemoryBody(capacity=64))
            with pytest.raises(NotFound, match="there is no instance"):
                await ask.memory(name)

    play(scenario)
