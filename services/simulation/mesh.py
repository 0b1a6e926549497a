"""The whole mesh in one process: the real services on `MemoryBus`, simulated engines, any clock.

With `VirtualTimeLoop` and a seed it takes the same course each time.
"""

import asyncio
import random
from dataclasses import dataclass, field

from meshift.backends.sim.engine import DEFAULT_MODEL, SimEngine
from meshift.backends.sim.parameters import SimParameters
from meshift.backends.sim.pipeline import SimPipeline
from meshift.backends.sim.work import Emit
from meshift.kv_memory.transport.memory import MemoryFabric, MemoryTransport
from meshift.schemas.identity import FrontendRef, Owner
from meshift.schemas.instances import InstanceState, ModelInfo
from meshift.services.bus.faults import Faults
from meshift.services.bus.memory import MemoryBus, MemoryNetwork, Mode
from meshift.services.coordinator.core import CoordinatorCore
from meshift.services.coordinator.options import CoordinatorOptions
from meshift.services.frontend.core import FrontendCore, FrontendOptions
from meshift.services.scheduler.core import SchedulerCore, SchedulerOptions
from meshift.services.worker.core import WorkerCore
from meshift.services.worker.options import WorkerOptions
from meshift.tracing import propagation
from meshift.tracing.spans import NO_TRACER, Tracer


@dataclass(frozen=True)
class MeshOptions:
    """What a simulated mesh is made of."""

    instances: int = 16
    frontends: int = 1
    seed: int = 0
    bus_mode: Mode = Mode.VALIDATE
    bus_delay_s: float = 0.0002
    restart_delay_s: float = 2.0
    """From a worker's end until its launcher has a new one up."""
    drained_leave: bool = False
    """A worker that has drained is not started again, as `meshift up` does it; else as a container's policy does."""
    parameters: SimParameters = field(default_factory=SimParameters)
    skip_steps: bool = False
    emit: Emit = "step"
    worker: WorkerOptions = field(default_factory=WorkerOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    model: ModelInfo = DEFAULT_MODEL
    pipeline: SimPipeline | None = None
    """Of each engine. With one, there is a coordinator too."""
    coordinator: CoordinatorOptions = field(default_factory=CoordinatorOptions)
    frontend: FrontendOptions = field(default_factory=FrontendOptions)
    tracer: Tracer = NO_TRACER
    """Of all services. Without one, messages carry no trace."""


@dataclass(slots=True)
class WorkerNode:
    """One life of a worker."""

    core: WorkerCore
    engine: SimEngine
    bus: MemoryBus
    supervision: "asyncio.Task[None] | None" = None

    @property
    def serves(self) -> bool:
        """Whether its process lives and its engine is up."""
        up = self.core.state in (InstanceState.READY, InstanceState.DRAINING)
        return up and not self.core.ended.done()


class SimulatedMesh:
    """Starts services, kills them, starts them again. Names: `worker-0`..., `frontend-0`..., `scheduler`,
    `coordinator`."""

    def __init__(self, options: MeshOptions) -> None:
        self.options = options
        self.rng = random.Random(options.seed)
        self.faults = Faults(random.Random(self.rng.getrandbits(64)))
        self.network = MemoryNetwork(
            random.Random(self.rng.getrandbits(64)),
            mode=options.bus_mode,
            delay_s=options.bus_delay_s,
            faults=self.faults,
        )
        self.fabric = MemoryFabric(rng=random.Random(self.rng.getrandbits(64)))
        self.workers: dict[str, WorkerNode] = {}
        self.frontends: dict[str, FrontendCore] = {}
        self.scheduler: SchedulerCore | None = None
        self.coordinator: CoordinatorCore | None = None
        self._incarnation = 0
        self._stopping = False
        self._retiring: set[str] = set()

    @property
    def worker_names(self) -> list[str]:
        return [f"worker-{index}" for index in range(self.options.instances)]

    @property
    def frontend_names(self) -> list[str]:
        return [f"frontend-{index}" for index in range(self.options.frontends)]

    @property
    def other_names(self) -> list[str]:
        return ["scheduler"] if self.options.pipeline is None else ["scheduler", "coordinator"]

    async def start(self) -> None:
        """Everything up, and every frontend ready."""
        await self.start_scheduler()
        if self.options.pipeline is not None:
            await self.start_coordinator()
        for name in self.frontend_names:
            await self.start_frontend(name)
        for name in self.worker_names:
            await self.start_worker(name)
        while not self._all_known():  # noqa: ASYNC110 - nothing tells when a report arrives
            await asyncio.sleep(self.options.worker.report_interval_s)

    def _all_known(self) -> bool:
        return all(len(frontend.instances()) == self.options.instances for frontend in self.frontends.values())

    async def stop(self) -> None:
        """End everything. Idempotent."""
        self._stopping = True
        for frontend in list(self.frontends.values()):
            await frontend.stop()
        for node in list(self.workers.values()):
            if node.supervision is not None:
                node.supervision.cancel()
            await node.core.stop()
        if self.scheduler is not None:
            await self.scheduler.stop()
        if self.coordinator is not None:
            await self.coordinator.stop()
        self.frontends.clear()
        self.workers.clear()
        self.scheduler = self.coordinator = None

    # ---- one service at a time

    async def start_scheduler(self) -> None:
        """A new scheduler; it knows nothing."""
        bus = self._bus("scheduler")
        self.scheduler = SchedulerCore(
            "scheduler", self._next_incarnation(), bus, self.options.scheduler, tracer=self.options.tracer
        )
        await self.scheduler.start()

    async def kill_scheduler(self) -> None:
        """kill -9."""
        if self.scheduler is not None:
            self.network.kill("scheduler")
            await self.scheduler.stop()
            self.scheduler = None

    async def start_coordinator(self) -> None:
        """A new coordinator; it knows nothing."""
        self.coordinator = CoordinatorCore(
            "coordinator",
            self._next_incarnation(),
            self._bus("coordinator"),
            self.options.coordinator,
            tracer=self.options.tracer,
        )
        await self.coordinator.start()

    async def kill_coordinator(self) -> None:
        """kill -9."""
        if self.coordinator is not None:
            self.network.kill("coordinator")
            await self.coordinator.stop()
            self.coordinator = None

    async def start_frontend(self, name: str) -> None:
        """A new incarnation of a frontend."""
        ref = FrontendRef(frontend_id=name, incarnation=self._next_incarnation())
        core = FrontendCore(ref, self._bus(name), self.options.frontend, tracer=self.options.tracer)
        await core.start()
        self.frontends[name] = core

    async def kill_frontend(self, name: str) -> None:
        """kill -9: its clients' connections break."""
        core = self.frontends.pop(name, None)
        if core is not None:
            self.network.kill(name)
            await core.stop()

    async def start_worker(self, name: str, bus_name: str | None = None) -> None:
        """A new incarnation of a worker, started again whenever it ends. `bus_name`: another name on the network, for
        a second one beside the first."""
        owner = Owner(instance_id=name, incarnation=self._next_incarnation())
        transport = MemoryTransport(self.fabric, str(owner))
        engine = SimEngine(
            self.options.parameters,
            self.options.model,
            transport=transport,
            pipeline=self.options.pipeline,
            skip_steps=self.options.skip_steps,
            emit=self.options.emit,
        )
        bus = self._bus(bus_name or name)
        core = WorkerCore(owner, engine, bus, self.options.worker, tracer=self.options.tracer)
        node = WorkerNode(core, engine, bus)
        self.workers[name] = node
        await node.core.start()
        node.supervision = asyncio.get_running_loop().create_task(self._supervise(name, node))

    async def kill_worker(self, name: str) -> None:
        """kill -9 of a worker and its ranks; its launcher starts it again."""
        node = self.workers[name]
        if not node.core.ended.done():
            self.network.kill(name)
            node.core.ended.cancel()

    def retire(self, name: str, deadline_s: float) -> None:
        """Let an instance give its requests away or finish them, and leave for good."""
        self._retiring.add(name)
        self.workers[name].core.drain(deadline_s)

    async def _supervise(self, name: str, node: WorkerNode) -> None:
        state = None
        try:
            state = await node.core.ended
        except asyncio.CancelledError:
            if self._stopping:
                raise
        await node.core.stop()
        if name in self._retiring or (self.options.drained_leave and state is InstanceState.STOPPED):
            self._retiring.discard(name)
            del self.workers[name]
            return
        await asyncio.sleep(self.options.restart_delay_s)
        await self.start_worker(name)

    def _bus(self, name: str) -> MemoryBus:
        traced = self.options.tracer is not NO_TRACER
        return MemoryBus(self.network, name, propagator=propagation if traced else None)

    def _next_incarnation(self) -> int:
        self._incarnation += 1
        return self._incarnation
