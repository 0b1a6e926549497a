"""A `Launcher` of simulated instances, whose starts can be made to fail."""

import asyncio
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

from meshift.services.launcher.base import ChildStatus, LauncherError, LaunchSpec
from meshift.services.launcher.lifecycle import ENDED, ChildState
from meshift.services.simulation.mesh import SimulatedMesh


class StartFault(StrEnum):
    """How a start goes wrong."""

    DIES = "dies"
    HANGS = "hangs"


class SimLauncher:
    """Of a mesh with `drained_leave`. `fault_of` is asked at each launch, with how many came before it."""

    def __init__(self, mesh: SimulatedMesh, fault_of: Callable[[int], StartFault | None] = lambda number: None) -> None:
        self._mesh = mesh
        self._fault_of = fault_of
        self._children: dict[str, ChildState] = dict.fromkeys(mesh.worker_names, ChildState.READY)
        self._starts: dict[str, asyncio.Task[None]] = {}
        self.launched: list[str] = []

    async def launch(self, instance_id: str, spec: LaunchSpec) -> str:
        """See `Launcher`."""
        if self._state(instance_id) not in (*ENDED, None):
            raise LauncherError(f"{instance_id} runs already")
        fault = self._fault_of(len(self.launched))
        self.launched.append(instance_id)
        self._children[instance_id] = ChildState.STARTING
        self._starts[instance_id] = asyncio.get_running_loop().create_task(self._start(instance_id, fault))
        return instance_id

    async def _start(self, instance_id: str, fault: StartFault | None) -> None:
        if fault is StartFault.HANGS:
            await asyncio.Event().wait()
        if fault is StartFault.DIES:
            self._children[instance_id] = ChildState.FAILED
            raise LauncherError(f"{instance_id} died")
        await self._mesh.start_worker(instance_id)
        self._children[instance_id] = ChildState.READY

    async def wait_ready(self, instance_id: str) -> None:
        """See `Launcher`."""
        await asyncio.shield(self._starts[instance_id])

    async def retire(self, instance_id: str) -> None:
        """See `Launcher`: the mesh lets it leave for good."""

    async def stop(self, instance_id: str, deadline_s: float) -> None:
        """See `Launcher`."""
        start = self._starts.pop(instance_id, None)
        if start is not None and not start.done():
            start.cancel()
        if instance_id in self._mesh.workers:
            self._mesh.retire(instance_id, deadline_s)
        self._children[instance_id] = ChildState.STOPPED

    def list(self) -> list[ChildStatus]:
        """See `Launcher`."""
        return [
            ChildStatus(name, self._state(name) or state, None, 0, Path()) for name, state in self._children.items()
        ]

    def _state(self, name: str) -> ChildState | None:
        state = self._children.get(name)
        if state is not ChildState.READY:
            return state
        node = self._mesh.workers.get(name)
        if node is None:
            return ChildState.STOPPED
        return ChildState.READY if node.serves else ChildState.STARTING
