"""A simulated cluster that grows and shrinks."""

import asyncio

from meshift.backends.sim.parameters import SimParameters
from meshift.services.scheduler.policy.scaling import ScalingAction
from meshift.services.scheduler.policy.settings import ScalingSettings
from meshift.services.simulation import virtual_time
from meshift.services.simulation.elastic import Elastic
from meshift.services.simulation.mesh import MeshOptions, SimulatedMesh
from tests.support.mesh_kit import read, request, tokens_of

SETTINGS = ScalingSettings(enabled=True, calm_s=5.0, sustain_s=2.0, instances_max=3)
COLD = SimParameters(capacity=4000, cold_start_ns=5_000_000_000)


def test_it_grows_under_load_and_comes_down_at_zero_traffic() -> None:
    async def main() -> None:
        mesh = SimulatedMesh(MeshOptions(instances=1, parameters=COLD))
        await mesh.start()
        elastic = Elastic(mesh, SETTINGS, 0.1)
        elastic.start()
        frontend = mesh.frontends["frontend-0"]
        asks = [request(f"r{index}", 1500, 400) for index in range(8)]
        reads = [asyncio.ensure_future(read(frontend, ask)) for ask in asks]
        await asyncio.sleep(4.0)
        assert len(mesh.workers) == 3, "two are starting at once"
        assert elastic.actions[ScalingAction.START] == 1
        sizes = set()
        while not all(task.done() for task in reads):
            await asyncio.sleep(1.0)
            sizes.add(len(mesh.workers))
        assert [len(tokens_of(await task)) for task in reads] == [400] * 8
        assert max(sizes) == 3
        await asyncio.sleep(60.0)
        assert len(mesh.workers) == 1
        assert len(frontend.instances()) == 1
        assert len(tokens_of(await read(frontend, request("late", 100, 10)))) == 10
        assert elastic.instances / elastic.looks > 1
        await elastic.stop()
        await mesh.stop()

    virtual_time.run(main())


def test_a_dry_run_starts_nothing() -> None:
    async def main() -> None:
        mesh = SimulatedMesh(MeshOptions(instances=1, parameters=COLD))
        await mesh.start()
        elastic = Elastic(mesh, SETTINGS.model_copy(update={"dry_run": True}), 0.1)
        elastic.start()
        frontend = mesh.frontends["frontend-0"]
        reads = [read(frontend, request(f"r{index}", 1500, 100)) for index in range(6)]
        await asyncio.gather(*reads)
        assert elastic.actions[ScalingAction.START] > 0
        assert len(mesh.workers) == 1
        await elastic.stop()
        await mesh.stop()

    virtual_time.run(main())


def test_an_instance_that_is_starting_at_the_end_is_waited_for() -> None:
    async def main() -> None:
        mesh = SimulatedMesh(MeshOptions(instances=1, parameters=COLD))
        await mesh.start()
        elastic = Elastic(mesh, SETTINGS.model_copy(update={"instances_min": 2}), 0.1)
        elastic.start()
        await asyncio.sleep(0.5)
        await elastic.stop()
        assert [node.serves for node in mesh.workers.values()] == [True, True]
        await mesh.stop()

    virtual_time.run(main())
