"""How much of the headroom that priority classes ask for counts, over a whole cluster (`meshift` only).

As published, each instance that runs a request of high priority keeps free what its class asks for: nearly all of its
memory. A dozen requests clear a dozen instances, and all others crowd on the rest. Here what the others give up is
bounded, and spent on few instances.

A decode step is taken to last `1 + k * load` times as long as one without load, where `1 + k` is
`headroom.full_step_times`. With L the load of all memory, the others' steps last longer by the share
`x = headroom.others_slower_max` if the load of what is left to them rises from L to `L + x * (L + 1 / k)`. If they hold
U tokens, they need U divided by that; the rest of the cluster, less what the protected classes hold, is the budget.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshift.schemas.identity import Owner
from meshift.services.scheduler.policy.observation import Alternative, Explanation, InstanceObservation
from meshift.services.scheduler.policy.settings import HeadroomSettings


@dataclass(frozen=True, slots=True)
class HeadroomPlan:
    """What counts, from one round of reports on. Tokens unless said."""

    granted: Mapping[Owner, int] = field(default_factory=dict)
    """How much headroom counts at each instance, or would if a request that asks for it ran there. Empty: all of it."""
    budget: int = 0
    load: float = 0.0
    """Share of all memory that is held or waited for."""
    others_load: float = 0.0
    """What that may become for the others."""
    instances: Sequence[InstanceObservation] = ()
    settings: HeadroomSettings = field(default_factory=HeadroomSettings)

    def explain(self) -> Explanation:
        """The budget, and what each instance has of it."""
        alternatives = []
        for instance in self.instances:
            granted, asked = self.granted.get(instance.owner, 0), instance.report.headroom
            figures = {"granted": float(granted), "asked": float(asked), "protected": float(instance.protected)}
            rejected = "" if granted else "the budget is spent where more is protected"
            alternatives.append(Alternative(str(instance.owner), figures, rejected))
        inputs = {"budget": self.budget, "load": self.load, "others_load": self.others_load}
        spent = sum(min(self.granted.get(item.owner, 0), item.report.headroom) for item in self.instances)
        if not self.granted:
            return Explanation("all headroom counts", "no bound is set, or nobody asks for any", inputs)
        why = f"others at a load of {self.others_load:.3f} instead of {self.load:.3f} leave {self.budget} tokens"
        settings = self.settings.model_dump()
        return Explanation(f"{spent} tokens of headroom count", why, inputs | settings, tuple(alternatives))


def plan_headroom(instances: Sequence[InstanceObservation], settings: HeadroomSettings) -> HeadroomPlan:
    """Spends the budget on whole instances as far as it goes: first where the most protected class runs and holds
    most, as what it holds itself costs the others nothing more; last where the least must move away. `instances` are
    those that take requests."""
    asked = max((load.headroom for item in instances for load in item.report.classes), default=0)
    if settings.others_slower_max is None or not asked:
        return HeadroomPlan(instances=instances, settings=settings)
    load, others_load, budget = headroom_budget(instances, settings.others_slower_max, settings.full_step_times)
    left, granted = budget, {}
    for item in sorted(instances, key=_place):
        wanted = item.report.headroom or asked
        granted[item.owner] = min(wanted, left)
        left -= min(granted[item.owner], item.report.capacity - item.protected)
    return HeadroomPlan(granted, budget, load, others_load, instances, settings)


def _place(instance: InstanceObservation) -> tuple[int, int, int, Owner]:
    top = next((item for item in instance.report.classes if item.headroom), None)
    execution, used = (0, 0) if top is None else (top.execution, top.used)
    return -execution, -used, instance.report.used, instance.owner


def headroom_budget(
    instances: Sequence[InstanceObservation], slower_max: float, full_step_times: float
) -> tuple[float, float, int]:
    """The load now, the others' load at most, and the tokens of headroom that leaves them so. A full cluster has none
    to give: those that wait are others' as well."""
    capacity = sum(item.report.capacity for item in instances)
    protected = sum(item.protected for item in instances)
    wanted = sum(item.report.used + item.report.reserved + item.report.queued_demand for item in instances)
    if not wanted:
        return 0.0, 0.0, capacity
    load = wanted / capacity
    slower = load + slower_max * (load + 1 / (full_step_times - 1))
    others_load = min(slower, max(load, 1.0))
    budget = capacity - protected - (wanted - protected) / others_load
    return load, others_load, max(0, int(budget))
