"""A simulated mesh that grows and shrinks by itself, through a launcher on the bus."""

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

from meshift.backends.sim.parameters import SimParameters
from meshift.schemas.steering import DecisionsRequest, DecisionSubject
from meshift.services.bus.memory import MemoryBus
from meshift.services.launcher.base import LaunchSpec
from meshift.services.launcher.service import LauncherOptions, LauncherService
from meshift.services.scheduler.core import SchedulerCore, SchedulerOptions
from meshift.services.scheduler.policy.settings import PolicySettings
from meshift.services.simulation import virtual_time
from meshift.services.simulation.launching import SimLauncher, StartFault
from meshift.services.simulation.mesh import MeshOptions, SimulatedMesh
from tests.support.mesh_kit import read, request, tokens_of

COLD = SimParameters(capacity=4000, cold_start_ns=5_000_000_000)
SCALING: dict[str, Any] = {
    "enabled": True,
    "calm_s": 5.0,
    "sustain_s": 2.0,
    "instances_max": 3,
    "start_timeout_s": 20.0,
}
LONG_S = 90.0
"""Until an idle mesh is as small as may be."""


class Scaled:
    """A mesh, its launcher, and clients."""

    def __init__(self, mesh: SimulatedMesh, launcher: SimLauncher, service: LauncherService) -> None:
        self.mesh = mesh
        self.launcher = launcher
        self.service = service
        self.sizes: list[int] = []
        self._numbers = itertools.count()

    @property
    def scheduler(self) -> SchedulerCore:
        assert self.mesh.scheduler is not None
        return self.mesh.scheduler

    def load(self, count: int, outputs: int = 400) -> "list[asyncio.Task[int]]":
        """So many requests at once, each the third of an instance."""
        return [
            asyncio.get_running_loop().create_task(self._one(f"r{next(self._numbers)}", outputs)) for _ in range(count)
        ]

    async def _one(self, name: str, outputs: int) -> int:
        return len(tokens_of(await read(self.mesh.frontends["frontend-0"], request(name, 1500, outputs))))

    async def watched(self, tasks: "list[asyncio.Task[int]]") -> list[int]:
        """Their lengths; what the mesh grew to meanwhile is in `sizes`."""
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0.5)
            self.sizes.append(len(self.mesh.workers))
        return [await task for task in tasks]


Scenario = Callable[[Scaled], Awaitable[None]]


def play(
    scenario: Scenario,
    *,
    scaling: Mapping[str, Any] | None = None,
    faults: Callable[[int], StartFault | None] = lambda number: None,
    instances_max: int = 8,
) -> None:
    policy = PolicySettings.model_validate({"scaling": SCALING | dict(scaling or {})})

    async def run() -> None:
        options = MeshOptions(
            instances=1, parameters=COLD, drained_leave=True, scheduler=SchedulerOptions(scheduling=policy)
        )
        mesh = SimulatedMesh(options)
        await mesh.start()
        launcher = SimLauncher(mesh, faults)
        service = LauncherService(
            "launcher",
            1,
            MemoryBus(mesh.network, "launcher"),
            launcher,
            lambda name: LaunchSpec("worker"),
            "sim",
            LauncherOptions(instances_max=instances_max),
        )
        await service.start()
        try:
            await scenario(Scaled(mesh, launcher, service))
        finally:
            await service.stop()
            await mesh.stop()

    virtual_time.run(run())


def test_it_grows_under_load_and_comes_down_at_zero_traffic() -> None:
    async def scenario(scaled: Scaled) -> None:
        assert await scaled.watched(scaled.load(8)) == [400] * 8
        assert max(scaled.sizes) == 3
        assert len(scaled.launcher.launched) == 2
        await asyncio.sleep(LONG_S)
        assert len(scaled.mesh.workers) == 1
        assert scaled.scheduler.counters.scalings == {"start": 2, "drain": 2}
        assert await scaled.watched(scaled.load(1, 20)) == [20]
        decided = await scaled.mesh.frontends["frontend-0"].steering.decisions(
            DecisionsRequest(subject=DecisionSubject.SCALING)
        )
        assert [item.decision.split()[0] for item in decided.decisions] == ["drain", "drain", "start", "start"]
        assert any(item.subject is DecisionSubject.SCALING for item in decided.current)

    play(scenario)


def test_launchers_say_what_a_start_takes_and_spare_ones_go_after_twice_that() -> None:
    async def scenario(scaled: Scaled) -> None:
        assert await scaled.watched(scaled.load(8)) == [400] * 8
        assert scaled.service.report().start_s == pytest.approx(5.0, abs=0.5)
        await asyncio.sleep(14.0)
        assert len(scaled.mesh.workers) == 1
        assert scaled.scheduler.counters.scalings == {"start": 2, "drain": 2}

    play(scenario, scaling={"calm_s": None})


def test_a_cold_start_launches_what_is_wanted_and_no_more() -> None:
    async def scenario(scaled: Scaled) -> None:
        tasks = scaled.load(3, 500)
        await asyncio.sleep(2.0)
        assert len(scaled.launcher.launched) == 1
        await asyncio.sleep(3.0)
        assert len(scaled.launcher.launched) == 1, "it is capacity to come"
        assert [await task for task in tasks] == [500] * 3

    play(scenario, scaling={"load": 0.8})


def test_by_decode_steps_one_is_launched_at_a_time() -> None:
    async def scenario(scaled: Scaled) -> None:
        tasks = scaled.load(3, 2000)
        await asyncio.sleep(4.5)
        assert len(scaled.launcher.launched) == 1
        await asyncio.sleep(3.0)
        assert len(scaled.launcher.launched) == 1, "it is capacity to come"
        assert [await task for task in tasks] == [2000] * 3

    play(scenario, scaling={"figure": "ratio"})


def test_a_dry_run_launches_nothing_and_says_what_it_would() -> None:
    async def scenario(scaled: Scaled) -> None:
        await scaled.watched(scaled.load(6, 100))
        assert scaled.launcher.launched == []
        assert scaled.scheduler.counters.scalings["dry_start"] > 0
        (look, *_) = scaled.scheduler.decisions.newest(0.0, 1, DecisionSubject.SCALING)
        assert look.inputs["dry_run"] is True

    play(scenario, scaling={"dry_run": True})


def test_it_is_switched_on_while_it_runs() -> None:
    async def scenario(scaled: Scaled) -> None:
        tasks = scaled.load(8)
        await asyncio.sleep(5.0)
        assert scaled.launcher.launched == []
        await scaled.mesh.frontends["frontend-0"].steering.change_policy({"scaling": {"enabled": True}})
        await asyncio.sleep(2.0)
        assert len(scaled.launcher.launched) == 2
        assert scaled.scheduler.counters.scalings == {"start": 1}, "both at once"
        assert await scaled.watched(tasks) == [400] * 8
        assert scaled.launcher.launched

    play(scenario, scaling={"enabled": False})


def test_the_minimum_is_kept_up_without_any_traffic() -> None:
    async def scenario(scaled: Scaled) -> None:
        await asyncio.sleep(LONG_S)
        assert len(scaled.mesh.workers) == 2

    play(scenario, scaling={"instances_min": 2})


def test_a_start_that_dies_is_counted_and_tried_again_later() -> None:
    async def scenario(scaled: Scaled) -> None:
        tasks = scaled.load(6, 700)
        await asyncio.sleep(5.0)
        assert scaled.service.failures == 1
        (look,) = scaled.scheduler.decisions.current(0.0)[-1:]
        assert "starts fail (worker-1 died)" in look.why
        assert await scaled.watched(tasks) == [700] * 6
        assert len(scaled.launcher.launched) >= 2
        assert max(scaled.sizes) >= 2
        assert scaled.service.failures == 1

    play(scenario, faults=lambda number: StartFault.DIES if number == 0 else None)


def test_a_start_that_never_comes_up_is_given_up_and_does_not_block() -> None:
    async def scenario(scaled: Scaled) -> None:
        tasks = scaled.load(6, 900)
        await asyncio.sleep(15.0)
        assert (scaled.service.failures, len(scaled.launcher.launched)) == (0, 1)
        assert await scaled.watched(tasks) == [900] * 6
        assert scaled.service.failures == 1
        assert max(scaled.sizes) >= 2

    play(scenario, scaling={"instances_max": 2}, faults=lambda number: StartFault.HANGS if number == 0 else None)


def test_starts_that_always_fail_are_tried_ever_more_rarely() -> None:
    async def scenario(scaled: Scaled) -> None:
        await asyncio.sleep(600.0)
        # After 5, 10, 20, 40, 80, 160, 300 s.
        assert len(scaled.launcher.launched) == scaled.service.failures == 7
        assert await scaled.watched(scaled.load(1, 20)) == [20], "and what runs serves"

    play(scenario, scaling={"instances_min": 2}, faults=lambda number: StartFault.DIES)


def test_a_scheduler_that_restarts_while_one_starts_launches_no_other() -> None:
    async def scenario(scaled: Scaled) -> None:
        tasks = scaled.load(3, 1200)
        while not scaled.launcher.launched:
            await asyncio.sleep(0.1)
        await scaled.mesh.kill_scheduler()
        await scaled.mesh.start_scheduler()
        await asyncio.sleep(4.0)
        assert len(scaled.launcher.launched) == 1
        assert [await task for task in tasks] == [1200] * 3

    play(scenario, scaling={"sustain_s": 0.5})


def test_two_schedulers_launch_as_one() -> None:
    async def scenario(scaled: Scaled) -> None:
        policy = scaled.mesh.options.scheduler
        bus = MemoryBus(scaled.mesh.network, "second")
        second = SchedulerCore("second", 10_000, bus, policy)
        await second.start()
        await asyncio.sleep(30.0)
        assert len(scaled.mesh.workers) == 2
        assert len(scaled.launcher.launched) == 1
        assert second.counters.scalings.get("drain", 0) == 0
        await second.stop()

    play(scenario, scaling={"instances_min": 2})


def test_the_launchers_own_limit_holds() -> None:
    async def scenario(scaled: Scaled) -> None:
        await scaled.watched(scaled.load(8))
        assert max(scaled.sizes) == 2

    play(scenario, instances_max=2)


def test_an_instance_that_dies_is_capacity_to_come_while_it_is_started_again() -> None:
    async def scenario(scaled: Scaled) -> None:
        rng = random.Random(1)
        for _ in range(3):
            await asyncio.sleep(20.0 + rng.random())
            await scaled.mesh.kill_worker("worker-0")
        await asyncio.sleep(LONG_S)
        assert len(scaled.mesh.workers) == 1
        assert scaled.launcher.launched == []

    # Longer than it takes to come back: with none there, nothing tells how much an instance adds.
    play(scenario, scaling={"sustain_s": 10.0})
