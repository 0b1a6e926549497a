"""Random changes of layouts in a simulated mesh, from a seed: all kinds of targets, flags, deadlines; and cancels."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

from meshift.schemas import subjects
from meshift.schemas.errors import MeshError
from meshift.schemas.layouts import CommitMode, LayoutFlags
from meshift.schemas.reconfiguring import ReconfigureBody, ReconfigureCancel, ReconfigureOrder, ReconfigureReport
from meshift.services.bus.base import ServiceInfo
from meshift.services.bus.memory import MemoryBus
from meshift.services.simulation.mesh import SimulatedMesh

DEADLINES_S = (0.3, 2.0, 5.0)
RATES = (None, None, 2e7, 2e6)
"""Bytes a second: from as fast as it goes to never done in time."""

FLAGS = (
    *[LayoutFlags()] * 5,
    LayoutFlags(no_patch=True),
    LayoutFlags(no_patch=True, no_async=True),
    LayoutFlags(no_resize=True),
    LayoutFlags(restart=True),
)
CANCELLED_SHARE = 0.15
ANSWER_S = 60.0


@dataclass(slots=True)
class Shaper:
    """Orders `rate` changes a second."""

    mesh: SimulatedMesh
    rng: random.Random
    rate: float
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By outcome and refusal; or `no answer` and the error's code."""
    _tasks: "list[asyncio.Task[None]]" = field(default_factory=list)

    async def run(self, for_s: float) -> None:
        """For so long, and until all have been answered."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + for_s
        if not for_s:
            return
        bus = MemoryBus(self.mesh.network, "operator")
        await bus.start(ServiceInfo("operator", "operator"))
        while loop.time() < until_s:
            await asyncio.sleep(self.rng.expovariate(self.rate))
            self._tasks.append(loop.create_task(self._change(bus, self._order())))
            if self.rng.random() < CANCELLED_SHARE:
                self._tasks.append(loop.create_task(self._cancel(bus, self.rng.choice(self.mesh.worker_names))))
        for task in self._tasks:
            await task
        await bus.close()

    def _order(self) -> ReconfigureOrder:
        body = ReconfigureBody(
            layers=self._layers(),
            commit=self.rng.choice(list(CommitMode)),
            flags=self.rng.choice(FLAGS),
            bytes_per_s=self.rng.choice(RATES),
            deadline_s=self.rng.choice(DEADLINES_S),
            wait=True,
        )
        return ReconfigureOrder(instance_id=self.rng.choice(self.mesh.worker_names), body=body)

    def _layers(self) -> tuple[int, ...]:
        """Any aligned split, stages without layers included."""
        pipeline = self.mesh.options.pipeline
        assert pipeline is not None
        k, total, stages = pipeline.layers_per_group, pipeline.total, len(pipeline.layers)
        bounds = sorted(min(total, self.rng.randint(0, -(-total // k)) * k) for _ in range(stages - 1))
        return tuple(end - start for start, end in zip([0, *bounds], [*bounds, total], strict=True))

    async def _change(self, bus: MemoryBus, order: ReconfigureOrder) -> None:
        try:
            report = await bus.request(subjects.RECONFIGURE, order, ReconfigureReport, timeout_s=ANSWER_S)
        except MeshError as error:
            self.outcomes["no answer", error.code.value] += 1
        else:
            outcome = "" if report.outcome is None else report.outcome.value
            self.outcomes[outcome, "" if report.refusal is None else report.refusal.value] += 1

    async def _cancel(self, bus: MemoryBus, name: str) -> None:
        await asyncio.sleep(self.rng.uniform(0.0, 1.0))
        try:
            cancel = ReconfigureCancel(instance_id=name)
            await bus.request(subjects.RECONFIGURE_CANCEL, cancel, ReconfigureReport, timeout_s=ANSWER_S)
        except MeshError as error:
            self.outcomes["not cancelled", error.code.value] += 1
