"""What the tests of moves in a simulated mesh are written with."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from meshift.schemas import subjects
from meshift.schemas.moves import MoveMode, MoveOrder, MoveOutcome, MoveReport
from meshift.services.bus.memory import MemoryBus
from meshift.services.frontend.core import FrontendCore
from meshift.services.frontend.streams import Stream
from meshift.services.simulation.mesh import SimulatedMesh, WorkerNode
from meshift.services.worker.requests import RequestRecord
from tests.support.mesh_kit import outsider

POLL_S = 0.005
WAIT_S = 60.0

MOVE_SUBJECTS = (".move-", ".fence")


async def until(condition: Callable[[], bool], what: str, poll_s: float = POLL_S) -> None:
    """Wait for it, in virtual time."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + WAIT_S
    while not condition():
        assert loop.time() < deadline_s, f"{WAIT_S} s without: {what}"
        await asyncio.sleep(poll_s)


def record_of(mesh: SimulatedMesh, request_id: str) -> tuple[WorkerNode, RequestRecord] | None:
    """Where it runs (or waits), and what is known of it there."""
    for node in mesh.workers.values():
        for record in node.core.requests:
            if record.key.request_id == request_id and not record.over:
                return node, record
    return None


async def running(mesh: SimulatedMesh, request_id: str, tokens: int = 1) -> tuple[WorkerNode, RequestRecord]:
    """The same, when it has so many tokens."""

    def there() -> bool:
        found = record_of(mesh, request_id)
        return found is not None and found[1].end >= tokens

    await until(there, f"{tokens} tokens of {request_id}")
    found = record_of(mesh, request_id)
    assert found is not None
    return found


@dataclass
class Operator:
    """Orders moves over the bus."""

    bus: MemoryBus

    @classmethod
    async def join(cls, mesh: SimulatedMesh) -> "Operator":
        return cls(await outsider(mesh))

    async def move(
        self, source: WorkerNode, request_id: str, destination: WorkerNode | None = None, **options: Any
    ) -> MoveReport:
        """The whole of it."""
        owner = source.core.owner
        order = MoveOrder(
            owner=owner,
            request_id=request_id,
            destination=None if destination is None else destination.core.owner,
            **({"mode": MoveMode.LIVE} | options),
        )
        return await self.bus.request(subjects.worker_move(owner.instance_id), order, MoveReport, timeout_s=WAIT_S)

    async def moved(self, source: WorkerNode, request_id: str, **options: Any) -> MoveReport:
        """The same, which must come about."""
        report = await self.move(source, request_id, **options)
        assert report.outcome is MoveOutcome.MOVED, report
        return report


def stream_of(frontend: FrontendCore, request_id: str) -> Stream:
    """The frontend's side of it."""
    return frontend._streams[request_id]


@dataclass
class OneFault:
    """Spoils one message about moves, once it is armed: the one after `skip` others that match."""

    mesh: SimulatedMesh
    kind: str
    """`drop`, `delay` or `duplicate`."""
    skip: int = 0
    subjects: tuple[str, ...] = MOVE_SUBJECTS
    delay_s: float = 45.0
    hits: list[str] = field(default_factory=list)

    def arm(self) -> None:
        faults = self.mesh.faults
        usual = faults.copies
        left = self.skip

        def copies(sender: str, receiver: str, subject: str) -> tuple[int, ...]:
            nonlocal left
            found = usual(sender, receiver, subject)
            if self.hits or not any(part in subject for part in self.subjects):
                return found
            if left:
                left -= 1
                return found
            self.hits.append(f"{sender} to {receiver}: {subject}")
            return {"drop": (), "delay": (round(self.delay_s * 1e9),), "duplicate": (0, 700_000_000)}[self.kind]

        faults.copies = copies  # type: ignore[method-assign]
        faults.active = True
