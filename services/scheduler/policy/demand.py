"""How many instances the load asks for: the tokens that requests hold and wait for. What is remembered of the past is a
value."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from meshift.services.scheduler.policy.observation import InstanceObservation
from meshift.services.scheduler.policy.settings import ScalingSettings


@dataclass(frozen=True, slots=True)
class HeldDemand:
    """Of prompts that wait at the scheduler, in no instance's report. Tokens."""

    total: int = 0
    largest: int = 0


NOTHING_HELD = HeldDemand()


@dataclass(frozen=True, slots=True)
class Peaks:
    """How many instances were wanted, as far as no later look wanted as many: the first is the most."""

    entries: tuple[tuple[float, int], ...] = ()
    """When and how many; at most as many as there may be instances."""

    def after(self, wanted: int, now_s: float, over_s: float) -> "Peaks":
        """With this one. Those older than `over_s` are forgotten."""
        kept = [(when_s, most) for when_s, most in self.entries if now_s - when_s <= over_s and most > wanted]
        return Peaks((*kept, (now_s, wanted)))

    @property
    def most(self) -> int:
        """The most that were wanted."""
        return self.entries[0][1] if self.entries else 0


NO_PEAKS = Peaks()


def demand_of(instances: Sequence[InstanceObservation], held: HeldDemand) -> int:
    """Tokens that requests hold, were promised, or wait for, at instances and at the scheduler. What an engine that
    admits nothing still has free is of no use to those that wait: it counts as held."""
    total = held.total
    for report in (item.report for item in instances):
        closed = report.batch_full and report.waiting > 0
        total += report.capacity if closed else report.used + report.reserved
        total += report.queued_demand
    return total


def wanted_instances(demand: int, serving: Sequence[InstanceObservation], settings: ScalingSettings) -> int:
    """So many, of the mean size of those that serve, that `settings.load` of their memory is held or waited for."""
    capacity = sum(item.report.capacity for item in serving)
    wanted = ceil(demand * len(serving) / (settings.load * capacity)) if capacity else 0
    return min(max(wanted, settings.instances_min), settings.instances_max)
