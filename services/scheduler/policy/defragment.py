"""De-fragmentation by explicit packing, to compare with Llumnix's inflated load (section 4.4.2): where the head of a
queue lacks room that the cluster has, find the instance that can make it with the least copying, and whereto.

Instances only, no requests: which requests fit into the gaps is the source worker's choice, so a plan is the least
number of destinations whose free tokens hold what is missing, the roomiest first (first fit, descending).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from meshift.services.scheduler.policy.freeness import migration_freeness
from meshift.services.scheduler.policy.observation import InstanceObservation
from meshift.services.scheduler.policy.pairing import Pair, PairingPlan
from meshift.services.scheduler.policy.settings import PolicySettings


@dataclass(slots=True)
class _Bin:
    instance: InstanceObservation
    free: int


def pack(instances: Sequence[InstanceObservation], settings: PolicySettings, now_s: float) -> PairingPlan:
    """Pairs that make room for blocked heads, the least missing first: that one costs least and starts soonest. Each
    source has one destination a round: the roomiest; what is still missing then is the next round's."""
    bins = [_Bin(item, item.free) for item in instances if not item.is_draining and not item.report.waiting]
    blocked = [(missing_room(item), item) for item in instances]
    sources = [(missing, item) for missing, item in blocked if missing > 0 and item.report.running]
    sources.sort(key=lambda entry: (not entry[1].is_draining, entry[0], entry[1].owner))
    pairs = []
    for missing, source in sources:
        bins.sort(key=lambda entry: (-entry.free, entry.instance.owner))
        if not bins or sum(entry.free for entry in bins) < missing:
            # Not fragmentation: the cluster has no room. Copying would only shift the queue.
            continue
        chosen = bins.pop(0)
        tokens = min(missing, chosen.free)
        expires_s = now_s + settings.migration.pair_ttl_s
        pairs.append(Pair(source.owner, chosen.instance.owner, chosen.free, tokens, 0.0, expires_s))
    freeness = {item.owner: migration_freeness(item, settings.sees_priorities) for item in instances}
    return PairingPlan(tuple(pairs), freeness, instances, settings)


def missing_room(instance: InstanceObservation) -> int:
    """Tokens that the head of its queue lacks; all that it holds if the instance drains."""
    if instance.is_draining:
        return instance.report.used
    return max(0, instance.report.head_demand - instance.free) if instance.report.waiting else 0


def fragmented_tokens(instances: Sequence[InstanceObservation]) -> int:
    """Free memory of the cluster that would satisfy blocked heads of queues, but is scattered (Llumnix, Figure 12):
    heads are served from the cluster's free memory, the smallest first, while it lasts."""
    demands = sorted([item.report.head_demand for item in instances if item.report.waiting])
    if not demands:
        return 0
    free = sum([item.report.free + item.report.cached for item in instances])
    served = 0
    for demand in demands:
        if served + demand > free:
            break
        served += demand
    return served
