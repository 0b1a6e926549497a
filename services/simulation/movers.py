"""Random moves in a simulated mesh, from a seed: all modes, near and far deadlines, named destinations and any."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

from meshift.schemas.identity import Owner
from meshift.schemas.moves import MoveMode, MoveOrder, MoveReport
from meshift.services.simulation.mesh import SimulatedMesh, WorkerNode
from meshift.services.worker.requests import RequestRecord

DEADLINES_S = (0.03, 0.2, 5.0, 30.0)


@dataclass(slots=True)
class Mover:
    """Orders `rate` moves a second."""

    mesh: SimulatedMesh
    rng: random.Random
    rate: float
    outcomes: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """By mode, outcome and refusal."""
    _tasks: "list[asyncio.Task[None]]" = field(default_factory=list)

    async def run(self, for_s: float) -> None:
        """For so long, and until all have ended."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + for_s
        while loop.time() < until_s:
            await asyncio.sleep(self.rng.expovariate(self.rate))
            node = self._node()
            records = [] if node is None else [record for record in node.core.requests if not record.over]
            if node is not None and records:
                self._tasks.append(loop.create_task(self._move(node, self.rng.choice(records))))
        for task in self._tasks:
            await task

    def _node(self) -> WorkerNode | None:
        live = [node for node in self.mesh.workers.values() if node.serves]
        return self.rng.choice(live) if live else None

    async def _move(self, node: WorkerNode, record: RequestRecord) -> None:
        order = MoveOrder(
            owner=node.core.owner,
            request_id=record.key.request_id,
            destination=self._destination(node),
            mode=self.rng.choice(list(MoveMode)),
            deadline_s=self.rng.choice(DEADLINES_S),
        )
        fallback = self.rng.random() < 0.3
        try:
            report = await node.core.moves.begin(order, fallback=fallback)
        except asyncio.CancelledError:
            # The worker died, and the move with it.
            self.outcomes[order.mode.value, "died", ""] += 1
        else:
            self._count(report)

    def _destination(self, node: WorkerNode) -> Owner | None:
        others = [other.core.owner for other in self.mesh.workers.values() if other is not node]
        return self.rng.choice([None, *others])

    def _count(self, report: MoveReport) -> None:
        outcome = "" if report.outcome is None else report.outcome.value
        refusal = "" if report.refusal is None else report.refusal.value
        self.outcomes[report.mode.value, outcome, refusal] += 1
