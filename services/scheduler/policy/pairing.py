"""Which instance gives requests to which (Llumnix, section 4.4.3), once per round of reports.

Destinations are sorted by free tokens, not by freeness: the freest instance by freeness may be one with a single
large request and no room, and thousands of reservations were refused when it was chosen.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

from meshift.schemas.identity import Owner
from meshift.services.scheduler.policy.dispatch import fits, reach
from meshift.services.scheduler.policy.freeness import migration_freeness
from meshift.services.scheduler.policy.observation import Alternative, Explanation, InstanceObservation
from meshift.services.scheduler.policy.settings import PolicySettings

PairTimes = Mapping[tuple[Owner, Owner], float]
"""When (source, destination) were last paired."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A source gives requests to a destination until it is above its threshold, or the pair's time is over."""

    source: Owner
    destination: Owner
    tokens_max: int
    """What the destination has free: nothing larger is to be chosen."""
    tokens_wanted: int
    """What the source must lose to be above its threshold; at most `tokens_max`. Charged to the destination."""
    until_freeness: float
    expires_s: float
    waiting: bool = False
    """The head of the source's queue goes, which has no KV to copy, instead of running ones."""


@dataclass(frozen=True, slots=True)
class PairingPlan:
    """The pairs of one round."""

    pairs: tuple[Pair, ...]
    freeness: Mapping[Owner, float]
    instances: Sequence[InstanceObservation]
    settings: PolicySettings

    def explain(self) -> Explanation:
        """Each instance's figures, and why it is in no pair."""
        sources = {pair.source: pair.destination for pair in self.pairs}
        destinations = {pair.destination for pair in self.pairs}
        alternatives = []
        for instance in self.instances:
            figures = {"freeness": self.freeness[instance.owner], "free": float(instance.free)}
            paired = instance.owner in sources or instance.owner in destinations
            rejected = "" if paired else self._objection(instance)
            alternatives.append(Alternative(str(instance.owner), figures, rejected))
        decision = ", ".join(f"{source} to {destination}" for source, destination in sources.items()) or "no pairs"
        migration = self.settings.migration
        thresholds = {"out_below": self.settings.out_below, "in_above": self.settings.in_above}
        inputs = migration.model_dump() | thresholds
        why = f"sources below {self.settings.out_below:g}, destinations above {self.settings.in_above:g} decode steps"
        return Explanation(decision, why, inputs, tuple(alternatives))

    def _objection(self, instance: InstanceObservation) -> str:
        freeness = self.freeness[instance.owner]
        if freeness < self.settings.out_below:
            return "no destination left" if instance.report.running else "nothing runs there"
        if freeness <= self.settings.in_above:
            return "neither overloaded nor free"
        return "no source left" if instance.free > 0 else "nothing free"


def pair_instances(
    instances: Sequence[InstanceObservation], settings: PolicySettings, now_s: float, paired: PairTimes
) -> PairingPlan:
    """Sources by freeness ascending with destinations by free tokens descending. An instance is in one pair at most.
    `instances` are the live ones whose report no earlier round has acted on."""
    migration = settings.migration
    headroom = settings.sees_priorities
    requeued = requeue(instances, settings, now_s) if settings.requeues else []
    busy = {owner for pair in requeued for owner in (pair.source, pair.destination)}
    over_s = migration.inflate_over_s
    freeness = {item.report.owner: migration_freeness(item, headroom, over_s) for item in instances}
    able = [item for item in instances if item.owner not in busy] if busy else instances
    out_below = settings.out_below
    sources = [item for item in able if freeness[item.report.owner] < out_below and item.report.running]
    if not sources:
        return PairingPlan(tuple(requeued), freeness, instances, settings)
    destinations = [item for item in able if freeness[item.owner] > settings.in_above and item.free > 0]
    sources.sort(key=lambda item: (freeness[item.owner], item.owner))
    destinations.sort(key=lambda item: (-item.free, item.owner))
    left = _Line(destinations)
    pairs = []
    for source in sources:
        if not len(left):
            break
        may = partial(_may_give, source, migration.reverse_after_s, now_s, paired)
        destination = left.take(may)
        if destination is not None:
            pairs.append(_pair(source, destination, settings, now_s))
    return PairingPlan((*requeued, *pairs), freeness, instances, settings)


def requeue(instances: Sequence[InstanceObservation], settings: PolicySettings, now_s: float) -> list[Pair]:
    """Where the head of a queue lacks room that another instance has, with the steps for its batch to grow, or where an
    engine admits nothing, for what its batch may grow to: it goes there, at the price of a message. A preempted request
    is such a head too. The ones that lack most first; each to the freest that nobody waits at. Then those that such a
    head blocks."""
    blocked = [
        item
        for item in instances
        if item.report.waiting and (item.report.batch_full or item.report.head_demand > item.free)
    ]
    if not blocked:
        return []
    blocked.sort(key=lambda item: (not item.is_draining, item.free - item.report.head_demand, item.owner))
    open_ones = [item for item in instances if not item.is_draining and not item.report.waiting]
    freeness = {item.owner: migration_freeness(item, settings.sees_priorities) for item in open_ones}
    left = _Line(sorted(open_ones, key=lambda item: (freeness[item.owner], item.owner), reverse=True))
    refused = inf
    pairs, stuck = [], []
    for source in blocked:
        demand = source.report.head_demand
        # Places only get fewer: where one found none, a larger one needs no look.
        chosen = left.take(partial(_holds, demand, settings)) if demand < refused else None
        if chosen is not None:
            pairs.append(_waiting_pair(source, chosen, chosen.room, demand, settings, now_s))
            continue
        refused = min(refused, demand)
        stuck.append(source)
    return [*pairs, *_unblocked(stuck, left, settings, now_s)]


def _unblocked(
    stuck: Sequence[InstanceObservation], left: "_Line", settings: PolicySettings, now_s: float
) -> list[Pair]:
    """Where the head has room nowhere, others that it blocks may have some: one of them goes, the first that fits."""
    pairs = []
    for source in stuck:
        report = source.report
        if report.waiting < 2:
            continue
        demand = max(1, (report.queued_demand - report.head_demand) // (report.waiting - 1))
        chosen = left.take(partial(_holds, demand, settings))
        if chosen is not None:
            room = int(min(chosen.room, reach(chosen, settings.dispatch)))
            pairs.append(_waiting_pair(source, chosen, room, demand, settings, now_s))
    return pairs


def _waiting_pair(
    source: InstanceObservation,
    destination: InstanceObservation,
    room: int,
    demand: int,
    settings: PolicySettings,
    now_s: float,
) -> Pair:
    return Pair(
        source=source.owner,
        destination=destination.owner,
        tokens_max=room,
        tokens_wanted=demand,
        until_freeness=settings.out_below,
        expires_s=now_s + settings.migration.pair_ttl_s,
        waiting=True,
    )


class _Line:
    """Instances in an order, of which one after another is taken out, mostly near the front."""

    def __init__(self, ordered: Sequence[InstanceObservation]) -> None:
        self._left = list(reversed(ordered))

    def __len__(self) -> int:
        return len(self._left)

    def take(self, suits: Callable[[InstanceObservation], bool]) -> InstanceObservation | None:
        """The first that suits; it is out then."""
        left = self._left
        for index in range(len(left) - 1, -1, -1):
            if suits(left[index]):
                return left.pop(index)
        return None


def _holds(demand: int, settings: PolicySettings, destination: InstanceObservation) -> bool:
    return fits(destination, demand, settings.dispatch)


def _may_give(
    source: InstanceObservation,
    reverse_after_s: float,
    now_s: float,
    paired: PairTimes,
    destination: InstanceObservation,
) -> bool:
    """Unless the destination itself gave to the source a moment ago: what it gave would come back. A draining source
    may give to all."""
    reversed_s = paired.get((destination.owner, source.owner))
    return source.is_draining or reversed_s is None or now_s - reversed_s >= reverse_after_s


def _pair(
    source: InstanceObservation, destination: InstanceObservation, settings: PolicySettings, now_s: float
) -> Pair:
    migration = settings.migration
    return Pair(
        source=source.owner,
        destination=destination.owner,
        tokens_max=destination.free,
        tokens_wanted=min(missing_tokens(source, settings), destination.free),
        until_freeness=settings.out_below,
        expires_s=now_s + migration.pair_ttl_s,
    )


def missing_tokens(source: InstanceObservation, settings: PolicySettings) -> int:
    """What it must lose until its freeness is at the threshold; all that it holds if it drains."""
    report = source.report
    if source.is_draining:
        return report.used
    headroom = report.headroom if settings.sees_priorities else 0
    inflation = source.inflation(settings.migration.inflate_over_s)
    usage = report.used + report.reserved + inflation + source.moving_in + headroom
    return max(0, round(settings.out_below * max(report.running, 1) - (report.capacity - usage)))


class PairingRounds:
    """When a round of reports is complete, so that no decision is taken twice on the same report."""

    def __init__(self) -> None:
        self._fresh: dict[Owner, None] = {}

    def on_report(self, owner: Owner, live: int) -> bool:
        """`owner`, one of `live` instances, has reported. Whether to decide now: all have, or one that is late must
        not hold the others up, as this one has reported twice."""
        again = owner in self._fresh
        self._fresh[owner] = None
        return again or len(self._fresh) >= live

    def take(self) -> frozenset[Owner]:
        """Those with a report that no decision has seen; from now on all have been."""
        fresh = frozenset(self._fresh)
        self._fresh.clear()
        return fresh

    def forget(self, owner: Owner) -> None:
        """`owner` is gone."""
        self._fresh.pop(owner, None)
