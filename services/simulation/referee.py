"""Watches a simulated mesh: a request has one owner in each attempt, whatever moves and dies."""

from meshift.schemas.identity import Owner, RequestKey
from meshift.services.periodic import Periodic
from meshift.services.simulation.mesh import SimulatedMesh, WorkerNode
from meshift.services.worker.moves.source_table import SourceState

UNDECIDED = frozenset({SourceState.COMMITTING, SourceState.ASKING, SourceState.FENCING, SourceState.RELEASING})
"""Where a source holds a request frozen, of which the destination may be the owner."""


class Referee:
    """Looks every `period_s`; `check` raises what it saw."""

    def __init__(self, mesh: SimulatedMesh, period_s: float) -> None:
        self._mesh = mesh
        self._periodic = Periodic(period_s, self.look)
        self.problems: list[str] = []
        self.looks = 0

    def start(self) -> None:
        """Begin to watch."""
        self._periodic.start()

    def look(self) -> None:
        """At all workers, now."""
        self.looks += 1
        owners: dict[tuple[str, int], tuple[Owner, RequestKey]] = {}
        for node in self._mesh.workers.values():
            if not node.serves:
                continue
            for key in _held(node):
                name = (key.request_id, key.attempt)
                known = owners.setdefault(name, (node.core.owner, key))
                if known[0] != node.core.owner:
                    self.problems.append(f"{known[1]} runs on {known[0]}, and {key} on {node.core.owner}")

    def check(self) -> None:
        """Raises AssertionError if a request ever had two owners in one attempt."""
        self._periodic.stop()
        assert self.looks, "it never looked"
        assert not self._periodic.failures, "it couldn't look"
        assert not self.problems, "; ".join(self.problems[:3])


def _held(node: WorkerNode) -> list[RequestKey]:
    """What runs there, or would."""
    moves = node.core.moves
    running = moves.describe().running if moves.running() else ()
    undecided = {move.request_id for move in running if move.phase in UNDECIDED}
    return [record.key for record in node.core.requests if not record.over and record.key.request_id not in undecided]
