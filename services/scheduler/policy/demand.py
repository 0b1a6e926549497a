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

TREND_SAMPLES = 16


@dataclass(frozen=True, slots=True)
class Trend:
    """The demand of the last while, in a few samples."""

    samples: tuple[tuple[float, int], ...] = ()
    """When, and tokens; the oldest first."""

    def after(self, demand: int, now_s: float, over_s: float) -> "Trend":
        """With this one. Of those as old as `over_s` only the newest is kept, which says what there was then."""
        samples = self.samples
        if not samples or now_s - samples[-1][0] >= over_s / TREND_SAMPLES:
            samples = (*samples, (now_s, demand))
        old = sum(now_s - when_s >= over_s for when_s, _ in samples)
        return Trend(samples[max(0, old - 1) :])

    def growth(self, demand: int, now_s: float, over_s: float) -> int:
        """By how many tokens it will have grown in `over_s`, if it goes on as in the slower half of the `over_s` before
        now: one burst is no trend. 0 while less than half of that time was seen; what shrinks may be a lull."""
        if not self.samples:
            return 0
        begin_s, begin = self.samples[0]
        passed_s = now_s - begin_s
        middle_s, middle = max(sample for sample in self.samples if sample[0] <= begin_s + passed_s / 2)
        if passed_s < over_s / 2 or middle_s == begin_s:
            return 0
        rate = min((middle - begin) / (middle_s - begin_s), (demand - middle) / (now_s - middle_s))
        return max(0, round(rate * over_s))


NO_TREND = Trend()


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
