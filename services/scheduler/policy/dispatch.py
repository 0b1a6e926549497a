"""Dispatch: where a new request goes (Llumnix, section 4.4.3, and the baselines of its section 6.1)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from meshift.schemas.identity import Owner
from meshift.services.scheduler.policy.freeness import dispatch_freeness, memory_load, settled_load
from meshift.services.scheduler.policy.observation import Alternative, Explanation, InstanceObservation
from meshift.services.scheduler.policy.settings import DispatchSettings, PolicyName, PolicySettings


class Rank(NamedTuple):
    """How good an instance is for a prompt: greater is better, compared from left to right."""

    tier: int
    value: float
    turn: int
    """Ties go round-robin: the one that is next has the greatest."""


@dataclass(frozen=True, slots=True)
class DispatchDecision:
    """Where it goes, or that it waits."""

    owner: Owner | None
    """None: it fits nowhere and enough others wait at the instances already; ask again when something has changed."""
    reason: str
    fits: bool
    """Whether its prompt has room at once."""
    demand: int
    turn: int
    settings: PolicySettings
    instances: Sequence[InstanceObservation]

    def explain(self) -> Explanation:
        """Inputs, and each instance's figures with what spoke against it."""
        alternatives = []
        for index, instance in enumerate(self.instances):
            rank = rank_instance(instance, self.demand, (index - self.turn) % len(self.instances), self.settings)
            chosen = instance.owner == self.owner
            figures = {
                "freeness": round(dispatch_freeness(instance), 3),
                "room": float(instance.room),
                "load": float(memory_load(instance)),
                "waiting": float(instance.waiting),
                "kept": float(instance.headroom),
                "tier": float(rank.tier),
            }
            rejected = "" if chosen else self._objection(instance, rank)
            alternatives.append(Alternative(str(instance.owner), figures, rejected))
        inputs = {"policy": str(self.settings.policy), "demand": self.demand, "turn": self.turn}
        decision = "wait" if self.owner is None else str(self.owner)
        return Explanation(decision, self.reason, inputs, tuple(alternatives))

    def _objection(self, instance: InstanceObservation, rank: Rank) -> str:
        if self.settings.policy == "round-robin":
            return "not its turn"
        if rank.tier == TIER_FULL and self.owner is None:
            return f"{instance.waiting} requests wait there"
        if rank.tier == TIER_WAITS and self.owner is None:
            return "kept open for what fits"
        if self.demand <= instance.room and self.demand > instance.offered and self.fits:
            return f"{instance.headroom} tokens are kept free for a class above"
        if not fits(instance, self.demand, self.settings.dispatch) and self.fits:
            return f"room for {instance.offered} of {self.demand} tokens"
        if dispatch_freeness(instance) < 0:
            return "overloaded"
        if is_last(instance):
            return "busy with a long prompt" if instance.execution > 0 else "kept for a class above"
        return "another is freer"


TIER_FULL, TIER_WAITS, TIER_LAST, TIER_FITS = range(4)
"""Where it would lengthen a queue; where it waits next; where it fits, but isn't wanted; where it fits."""

LAST = 1e12
"""More tokens than any instance has."""

Ranker = Callable[[InstanceObservation, int, int, PolicySettings], Rank]


def choose_instance(
    instances: Sequence[InstanceObservation],
    demand: int,
    turn: int,
    settings: PolicySettings,
    *,
    may_wait: bool = True,
    waited_s: float = 0.0,
) -> DispatchDecision | None:
    """Where `demand` tokens go that have waited so long; None if there are no instances. `turn` counts the dispatches,
    for ties. Without `may_wait` the decision always has an owner."""
    count = len(instances)
    if not count:
        return None
    ranker = RANKERS[settings.policy]
    ranks = [ranker(instance, demand, -((index - turn) % count), settings) for index, instance in enumerate(instances)]
    best = max(range(count), key=ranks.__getitem__)
    queues = sum(instance.waiting > 0 for instance in instances)
    return decide_for(
        instances[best], ranks[best], demand, turn, settings, instances, queues, may_wait=may_wait, waited_s=waited_s
    )


def decide_for(
    chosen: InstanceObservation,
    rank: Rank,
    demand: int,
    turn: int,
    settings: PolicySettings,
    instances: Sequence[InstanceObservation],
    queues: int,
    *,
    may_wait: bool,
    waited_s: float,
) -> DispatchDecision:
    """The decision for the one that ranks first among `instances`, at `queues` of which somebody waits."""
    places = len(instances) if waited_s >= settings.dispatch.patience_s else settings.dispatch.queues_of(len(instances))
    holds = may_wait and settings.policy == "meshift" and _waits_here(chosen, rank, queues, places, settings)
    placed = fits(chosen, demand, settings.dispatch)
    return DispatchDecision(
        owner=None if holds else chosen.owner,
        reason=_reason(chosen, rank, len(instances), placed, holds, settings),
        fits=placed and not holds,
        demand=demand,
        turn=turn,
        settings=settings,
        instances=instances,
    )


def _waits_here(chosen: InstanceObservation, rank: Rank, queues: int, places: int, settings: PolicySettings) -> bool:
    """Whether a prompt waits at the scheduler rather than at the best instance: enough others wait there, or so many
    instances as may have a queue have one. What waits for much room keeps all that comes after it waiting, however
    small: it may do so at few instances, and the others stay open for what fits. But not for ever: where all are full,
    what is large would be passed by all that is small."""
    if rank.tier == TIER_WAITS and settings.dispatch.hold:
        return not chosen.waiting and queues >= places
    return rank.tier == TIER_FULL


def fits(instance: InstanceObservation, demand: int, settings: DispatchSettings) -> bool:
    """Whether a prompt of `demand` tokens has room there at once, and the batch then has its steps to grow."""
    return demand <= reach(instance, settings)


def reach(instance: InstanceObservation, settings: DispatchSettings) -> float:
    """The largest prompt that fits, in tokens. One that holds nothing takes whatever it can hold; one whose batch is
    full, none."""
    report, room = instance.report, instance.offered
    if room >= report.capacity:
        return inf
    if report.batch_full:
        return 0.0
    return room - settings.margin_steps * (report.running + instance.charged_requests + 1)


def is_last(instance: InstanceObservation) -> bool:
    """meshift: whether others where the prompt fits come before it. Those of negative freeness do; for a prompt of no
    priority those where headroom is granted, so that its prefill doesn't interrupt their steps; for the others those
    that are at a long prompt."""
    if dispatch_freeness(instance) < 0:
        return True
    return instance.stalled if instance.execution > 0 else _is_kept(instance)


def _is_kept(instance: InstanceObservation) -> bool:
    return instance.granted is not None and instance.kept > 0


def preference(instance: InstanceObservation, settings: PolicySettings) -> float:
    """meshift: the greater, the better, of instances where the prompt fits; those that are last have less than any
    other."""
    if instance.execution <= 0:
        freeness = dispatch_freeness(instance)
        return freeness - LAST if _is_kept(instance) else freeness
    # Of those that settle at the same load, the one that has least now.
    load = settled_load(instance, settings.headroom.request_tokens) + memory_load(instance) / LAST
    return -load - LAST if is_last(instance) else -load


def takes_waiting(instance: InstanceObservation, settings: DispatchSettings) -> bool:
    """Whether one more prompt may wait there."""
    return not settings.hold or instance.waiting < settings.waiting_max


def rank_instance(instance: InstanceObservation, demand: int, place: int, settings: PolicySettings) -> Rank:
    """The rank under these settings; `place` is how many turns it is from being next."""
    return RANKERS[settings.policy](instance, demand, -place, settings)


def _by_fit(instance: InstanceObservation, demand: int, turn: int, settings: PolicySettings) -> Rank:
    """meshift. Where it fits, the freest, or for one of high priority the least loaded: its steps are the fastest, and
    more of its class may be there already, from which others were moved away. Else where it is next and the least is
    missing."""
    if fits(instance, demand, settings.dispatch):
        return Rank(TIER_LAST if is_last(instance) else TIER_FITS, preference(instance, settings), turn)
    waits = takes_waiting(instance, settings.dispatch)
    return Rank(TIER_WAITS if waits else TIER_FULL, float(instance.offered), turn)


def _by_freeness(instance: InstanceObservation, demand: int, turn: int, settings: PolicySettings) -> Rank:
    """Llumnix: the greatest freeness. One with a negative one gets nothing while another has none, and the least
    negative one takes it when all are: that is the order of the figures."""
    return Rank(0, dispatch_freeness(instance, headroom=settings.sees_priorities), turn)


def _by_load(instance: InstanceObservation, demand: int, turn: int, settings: PolicySettings) -> Rank:
    """INFaaS++: the least memory load."""
    return Rank(0, -float(memory_load(instance)), turn)


def _by_turn(instance: InstanceObservation, demand: int, turn: int, settings: PolicySettings) -> Rank:
    """Round-robin."""
    return Rank(0, 0.0, turn)


RANKERS: Mapping[PolicyName, Ranker] = {
    "meshift": _by_fit,
    "llumnix": _by_freeness,
    "llumnix-base": _by_freeness,
    "infaas++": _by_load,
    "central": _by_load,
    "round-robin": _by_turn,
}


def _reason(
    chosen: InstanceObservation, rank: Rank, count: int, placed: bool, holds: bool, settings: PolicySettings
) -> str:
    if holds:
        return f"fits on none of {count}, and enough wait there already"
    if settings.policy == "round-robin":
        text = f"its turn among {count}"
    elif settings.policy in ("infaas++", "central"):
        text = f"load of {-rank.value:.0f} tokens, least of {count}"
    elif settings.policy == "meshift" and placed and chosen.execution > 0:
        load = settled_load(chosen, settings.headroom.request_tokens)
        text = f"load of {load:.0f} tokens for its class, least of {count}"
    elif settings.policy == "meshift" and not placed:
        text = f"room for {chosen.offered} tokens, most of {count}"
    else:
        freeness = dispatch_freeness(chosen, headroom=settings.sees_priorities)
        text = f"freeness {freeness:.1f}, greatest of {count}"
    return text if placed else f"{text}; prompt must wait for room"
