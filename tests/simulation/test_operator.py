"""What operators ask of a frontend's core."""

import asyncio

import pytest

from meshift.schemas.errors import NotFound, Unsupported
from meshift.schemas.instances import InstanceState
from meshift.schemas.memory import MemoryBody
from meshift.services.simulation.mesh import SimulatedMesh
from tests.support.mesh_kit import SETTLE_S, eight, play, streams


def test_open_requests_are_listed_until_they_end() -> None:
    asks = eight()

    async def scenario(mesh: SimulatedMesh) -> None:
        pending = streams(mesh, asks)
        await asyncio.sleep(1.0)
        frontends = list(mesh.frontends.values())
        seen = [item for frontend in frontends for item in frontend.open_requests()]
        assert sorted(item.request_id for item in seen) == sorted(ask.request_id for ask in asks)
        for item in seen:
            assert item.state == "running"
            assert item.owner is not None
            assert item.output_tokens > 0
            assert (item.attempt, item.hop) == (1, 0)
        await pending.all_exact()
        await asyncio.sleep(SETTLE_S)
        assert not any(frontend.open_requests() for frontend in frontends)

    play(scenario)


def test_an_instance_is_drained_through_a_frontend() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        frontend = mesh.frontends["frontend-0"]
        reply = await frontend.drain("worker-0", 60.0)
        assert reply.owner.instance_id == "worker-0"
        assert mesh.workers["worker-0"].core.state is not InstanceState.READY
        for name in ("worker-9", "no.such*name"):
            with pytest.raises(NotFound, match="there is no instance"):
                await frontend.drain(name, 60.0)

    play(scenario)


def test_an_instance_is_asked_for_another_capacity_through_a_frontend() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        frontend = mesh.frontends["frontend-0"]
        with pytest.raises(Unsupported, match="fixed size"):
            await frontend.resize_memory("worker-0", MemoryBody(capacity=64))
        for name in ("worker-9", "no.such*name"):
            with pytest.raises(NotFound, match="there is no instance"):
                await frontend.resize_memory(name, MemoryBody(capacity=64))

    play(scenario)
