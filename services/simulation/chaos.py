"""Random trouble for a simulated mesh, from a seed: crashes, hangs, drains, partitions, lossy wires.

A schedule is a plain list, made before the run, so that a failing seed can be read.
"""

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from meshift.kv_memory.transport import FaultRates
from meshift.services.simulation.mesh import SimulatedMesh

logger = logging.getLogger(__name__)


class Trouble(StrEnum):
    """What can happen."""

    KILL_WORKER = "kill_worker"
    CRASH_ENGINE = "crash_engine"
    HANG_ENGINE = "hang_engine"
    DRAIN_WORKER = "drain_worker"
    KILL_SCHEDULER = "kill_scheduler"
    KILL_FRONTEND = "kill_frontend"
    PARTITION = "partition"
    LOSSY_WIRES = "lossy_wires"
    CUT_DATA_PLANE = "cut_data_plane"
    LOSSY_DATA_PLANE = "lossy_data_plane"
    KILL_COORDINATOR = "kill_coordinator"
    BREAK_LAYOUT = "break_layout"
    """What an engine does for a change of its layout fails in the background."""


@dataclass(frozen=True, slots=True)
class Event:
    """One piece of trouble."""

    at_s: float
    trouble: Trouble
    targets: tuple[str, ...] = ()
    """Names of services; for a partition, one side of it."""
    duration_s: float = 0.0
    strength: float = 0.0
    """For lossy wires: probability that a message is dropped; it is duplicated and delayed at least as often. For a
    lossy data plane, that a patch is corrupted, or comes twice; it is lost a quarter as often."""
    one_way: bool = False


LAYOUT_TROUBLES = frozenset({Trouble.KILL_COORDINATOR, Trouble.BREAK_LAYOUT})
"""Of meshes whose layouts change."""


def plan(
    rng: random.Random, workers: list[str], frontends: list[str], until_s: float, count: int, *, layouts: bool = False
) -> list[Event]:
    """`count` events in [0, until_s), by time. `layouts`: there is a coordinator, and layouts change."""
    services = [*workers, *frontends, "scheduler", *(["coordinator"] if layouts else [])]
    troubles = [trouble for trouble in Trouble if layouts or trouble not in LAYOUT_TROUBLES]
    events = []
    for _ in range(count):
        trouble = rng.choice(troubles)
        at_s = rng.uniform(0.0, until_s)
        duration_s = rng.uniform(0.2, 6.0)
        if trouble is Trouble.PARTITION:
            side = tuple(sorted(rng.sample(services, rng.randint(1, max(1, len(services) // 2)))))
            events.append(Event(at_s, trouble, side, duration_s, one_way=rng.random() < 0.3))
        elif trouble is Trouble.LOSSY_WIRES:
            events.append(Event(at_s, trouble, (), duration_s, strength=rng.choice((0.01, 0.05, 0.2, 0.5))))
        elif trouble is Trouble.LOSSY_DATA_PLANE:
            events.append(Event(at_s, trouble, (), duration_s, strength=rng.choice((0.05, 0.2, 0.5))))
        elif trouble is Trouble.CUT_DATA_PLANE:
            events.append(Event(at_s, trouble, tuple(sorted(rng.sample(workers, 2))), duration_s))
        elif trouble is Trouble.KILL_FRONTEND:
            events.append(Event(at_s, trouble, (rng.choice(frontends),), duration_s))
        elif trouble is Trouble.KILL_SCHEDULER:
            events.append(Event(at_s, trouble, ("scheduler",), duration_s))
        elif trouble is Trouble.KILL_COORDINATOR:
            events.append(Event(at_s, trouble, ("coordinator",), duration_s))
        else:
            events.append(Event(at_s, trouble, (rng.choice(workers),), duration_s))
    return sorted(events, key=lambda event: event.at_s)


class Chaos:
    """Carries a plan out, and then makes everything whole again."""

    def __init__(self, mesh: SimulatedMesh, events: list[Event]) -> None:
        self._mesh = mesh
        self._events = events
        self._actions: dict[Trouble, Callable[[Event], object]] = {
            Trouble.CRASH_ENGINE: self._crash_engine,
            Trouble.HANG_ENGINE: self._hang_engine,
            Trouble.DRAIN_WORKER: self._drain,
            Trouble.PARTITION: self._partition,
            Trouble.LOSSY_WIRES: self._lossy,
            Trouble.CUT_DATA_PLANE: self._cut_data_plane,
            Trouble.LOSSY_DATA_PLANE: self._lossy_data_plane,
            Trouble.BREAK_LAYOUT: self._break_layout,
        }

    async def run(self) -> None:
        """Returns when the last event has been carried out and healed."""
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        tasks = []
        for event in self._events:
            await asyncio.sleep(max(0.0, begin_s + event.at_s - loop.time()))
            tasks.append(loop.create_task(self._carry_out(event)))
        for task in tasks:
            await task
        self._mesh.faults.heal()
        self._mesh.faults.set()

    async def _carry_out(self, event: Event) -> None:
        logger.info("%.3f s: %s %s", asyncio.get_running_loop().time(), event.trouble, " ".join(event.targets))
        if event.trouble is Trouble.KILL_WORKER:
            await self._mesh.kill_worker(event.targets[0])
        elif event.trouble is Trouble.KILL_SCHEDULER:
            await self._kill_scheduler(event)
        elif event.trouble is Trouble.KILL_COORDINATOR:
            await self._kill_coordinator(event)
        elif event.trouble is Trouble.KILL_FRONTEND:
            await self._kill_frontend(event)
        else:
            end = self._actions[event.trouble](event)
            await asyncio.sleep(event.duration_s)
            if callable(end):
                end()

    async def _kill_scheduler(self, event: Event) -> None:
        if self._mesh.scheduler is None:
            return
        await self._mesh.kill_scheduler()
        await asyncio.sleep(event.duration_s)
        await self._mesh.start_scheduler()

    async def _kill_coordinator(self, event: Event) -> None:
        if self._mesh.coordinator is None:
            return
        await self._mesh.kill_coordinator()
        await asyncio.sleep(event.duration_s)
        await self._mesh.start_coordinator()

    async def _kill_frontend(self, event: Event) -> None:
        name = event.targets[0]
        if name not in self._mesh.frontends:
            return
        await self._mesh.kill_frontend(name)
        await asyncio.sleep(event.duration_s)
        await self._mesh.start_frontend(name)

    def _crash_engine(self, event: Event) -> None:
        node = self._mesh.workers[event.targets[0]]
        if node.serves:
            node.engine.crash("chaos")

    def _hang_engine(self, event: Event) -> None:
        node = self._mesh.workers[event.targets[0]]
        if node.serves:
            node.engine.hang()

    def _break_layout(self, event: Event) -> None:
        node = self._mesh.workers[event.targets[0]]
        if node.serves:
            node.engine.break_layout("chaos")

    def _drain(self, event: Event) -> None:
        node = self._mesh.workers[event.targets[0]]
        if node.serves:
            node.core.drain(event.duration_s)

    def _partition(self, event: Event) -> Callable[[], None]:
        mesh = self._mesh
        others = {*mesh.worker_names, *mesh.frontend_names, *mesh.other_names} - set(event.targets)
        partition = mesh.faults.partition(event.targets, sorted(others), one_way=event.one_way)
        return lambda: mesh.faults.heal(partition)

    def _lossy(self, event: Event) -> Callable[[], None]:
        faults = self._mesh.faults
        faults.set(drop=event.strength, duplicate=0.05, delay=0.2, delay_s_max=0.5)
        return faults.set

    def _cut_data_plane(self, event: Event) -> Callable[[], None]:
        fabric = self._mesh.fabric
        one, other = (str(self._mesh.workers[name].core.owner) for name in event.targets)
        fabric.partition(one, other)
        return lambda: fabric.heal(one, other)

    def _lossy_data_plane(self, event: Event) -> Callable[[], None]:
        fabric, rate = self._mesh.fabric, event.strength
        fabric.faults = FaultRates(lost=rate / 4, corrupted=rate, duplicated=rate, acknowledgement_lost=rate / 4)

        def heal() -> None:
            fabric.faults = FaultRates()

        return heal
