"""Stands for the launcher of a simulated cluster that grows and shrinks: does what the scaling policy decides."""

import asyncio
from collections import Counter

from meshift.backends.sim.engine import DEFAULT_MODEL
from meshift.services.periodic import Periodic
from meshift.services.scheduler.policy.scaling import ScalingAction, ScalingState, scale
from meshift.services.scheduler.policy.settings import ScalingSettings
from meshift.services.simulation.mesh import SimulatedMesh

DRAIN_DEADLINE_S = 3600.0
"""An instance waits for requests that can't move for as long as they take."""


class Elastic:
    """Begins with `start`. An instance counts from the order to start it until it has left."""

    def __init__(self, mesh: SimulatedMesh, settings: ScalingSettings, interval_s: float) -> None:
        self.looks = 0
        self.instances = 0
        """Instances there, one a look each."""
        self.actions: Counter[ScalingAction] = Counter()
        self._mesh = mesh
        self._settings = settings
        self._state = ScalingState()
        self._number = len(mesh.worker_names)
        self._starting: set[asyncio.Task[None]] = set()
        self._periodic = Periodic(interval_s, self._look)

    def start(self) -> None:
        """The first look is one interval from now."""
        self._periodic.start()

    async def stop(self) -> None:
        """Look no more; wait for the instances that are starting, so that they can be stopped."""
        self._periodic.stop()
        # In a fixed order.
        for task in sorted(self._starting, key=lambda task: task.get_name()):
            await task

    def _look(self) -> None:
        self.looks += 1
        self.instances += len(self._mesh.workers)
        if self._mesh.scheduler is None:
            return
        now_s = asyncio.get_running_loop().time()
        scheduler = self._mesh.scheduler
        held = scheduler.held_demand(DEFAULT_MODEL.name)
        decision, self._state = scale(scheduler.observations(), self._state, self._settings, now_s, held)
        self.actions[decision.action] += 1
        if decision.dry_run:
            return
        if decision.action is ScalingAction.START:
            for _ in range(decision.count):
                self._begin()
        elif decision.owner is not None:
            self._mesh.retire(decision.owner.instance_id, DRAIN_DEADLINE_S)

    def _begin(self) -> None:
        name = f"worker-{self._number}"
        self._number += 1
        task = asyncio.get_running_loop().create_task(self._mesh.start_worker(name), name=f"start {name}")
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)
