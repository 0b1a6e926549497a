"""Looks at a simulated cluster at equal intervals, as its scheduler sees it."""

from dataclasses import dataclass

from meshift.services.periodic import Periodic
from meshift.services.scheduler.policy.defragment import fragmented_tokens
from meshift.services.scheduler.policy.freeness import migration_freeness
from meshift.services.simulation.mesh import SimulatedMesh


@dataclass(slots=True)
class ClusterSums:
    """Sums over all looks; `looks` of them."""

    looks: int = 0
    instances: int = 0
    """Instances seen, one a look each."""
    negative: int = 0
    """Instances with negative freeness."""
    fragmented: float = 0.0
    """Shares of the cluster's memory that are free, would satisfy the blocked heads of queues, but are scattered."""
    used: float = 0.0
    """Shares of the cluster's memory in use."""
    negative_s_max: float = 0.0
    """The longest that one instance's freeness was negative."""


class ClusterProbe:
    """Begins with `start`."""

    def __init__(self, mesh: SimulatedMesh, interval_s: float) -> None:
        self.sums = ClusterSums()
        self._mesh = mesh
        self._interval_s = interval_s
        self._negative_for: dict[str, int] = {}
        self._periodic = Periodic(interval_s, self._look)

    def start(self) -> None:
        """The first look is one interval from now."""
        self._periodic.start()

    def stop(self) -> None:
        """Idempotent."""
        self._periodic.stop()

    def _look(self) -> None:
        if self._mesh.scheduler is None:
            return
        seen = self._mesh.scheduler.observations()
        capacity = used = 0
        negative: list[str] = []
        for item in seen:
            report = item.report
            capacity += report.capacity
            used += report.used
            if migration_freeness(item) < 0:
                negative.append(report.owner.instance_id)
        if not capacity:
            return
        sums = self.sums
        sums.looks += 1
        sums.instances += len(seen)
        sums.fragmented += fragmented_tokens(seen) / capacity
        sums.used += used / capacity
        sums.negative += len(negative)
        self._negative_for = {name: self._negative_for.get(name, 0) + 1 for name in negative}
        longest = max(self._negative_for.values(), default=0)
        sums.negative_s_max = max(sums.negative_s_max, longest * self._interval_s)
