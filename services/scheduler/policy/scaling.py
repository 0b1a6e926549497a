"""Auto-scaling: how many instances. By the load of the cluster's memory (ours), or by decode steps in reserve (Llumnix,
section 4.4.3), without headroom, queues or fake requests."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from meshift.schemas.identity import Owner
from meshift.services.scheduler.policy.demand import (
    NO_PEAKS,
    NO_TREND,
    NOTHING_HELD,
    HeldDemand,
    Peaks,
    Trend,
    demand_of,
    wanted_instances,
)
from meshift.services.scheduler.policy.observation import Alternative, Explanation, InstanceObservation
from meshift.services.scheduler.policy.settings import ScalingFigure, ScalingSettings


class ScalingAction(StrEnum):
    """What to do."""

    NOTHING = "nothing"
    START = "start"
    DRAIN = "drain"


@dataclass(frozen=True, slots=True)
class ScalingState:
    """What the scaler remembers between two looks; starts empty after a restart of the scheduler."""

    low_since_s: float | None = None
    high_since_s: float | None = None
    short_since_s: float | None = None
    starting: tuple[float, ...] = ()
    """When instances were asked for that haven't reported yet: capacity to come."""
    known: int = 0
    """Live instances at the last look."""
    peaks: Peaks = NO_PEAKS
    peaks_since_s: float | None = None
    """Since when peaks are looked for."""
    start_s: float | None = None
    """How long the last start took; None: none was seen."""
    trend: Trend = NO_TREND


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """One look's outcome. With `dry_run` the action is only told."""

    action: ScalingAction
    owner: Owner | None
    """Whom to drain."""
    freeness: float
    why: str
    dry_run: bool
    live: int
    starting: int
    candidates: tuple[tuple[Owner, int], ...] = ()
    """Those that could be drained, and their running requests."""
    count: int = 1
    """How many to start."""
    demand: int = 0
    """Tokens that requests hold or wait for."""
    growth: int = 0
    """Tokens more, when an instance that is started now will have come."""

    def explain(self) -> Explanation:
        """The figure, the counts, and who else could have been drained."""
        alternatives = tuple(
            Alternative(str(owner), {"running": float(running)}, "" if owner == self.owner else "runs more requests")
            for owner, running in self.candidates
        )
        inputs = {
            "freeness": self.freeness,
            "demand": self.demand,
            "growth": self.growth,
            "live": self.live,
            "starting": self.starting,
            "dry_run": self.dry_run,
        }
        several = f" {self.count} instances" if self.action is ScalingAction.START and self.count > 1 else ""
        return Explanation(f"{self.action}{several} {self.owner or ''}".strip(), self.why, inputs, alternatives)


def cluster_freeness(
    instances: Sequence[InstanceObservation], figure: ScalingFigure, starting: int = 0, capacity: int = 0
) -> float:
    """In decode steps, over live instances that don't drain; `starting` ones of `capacity` tokens count as idle.

    The ratio of sums by default: in the mean of ratios one idle instance outweighs all others together."""
    spare = [item.report.capacity - item.report.used - item.report.reserved for item in instances]
    running = [item.report.running for item in instances]
    if figure == "mean":
        values = [free / max(batch, 1) for free, batch in zip(spare, running, strict=True)]
        values += [float(capacity)] * starting
        return sum(values) / max(len(values), 1)
    return (sum(spare) + starting * capacity) / max(sum(running), 1)


def is_short(instances: Sequence[InstanceObservation], held: HeldDemand = NOTHING_HELD) -> bool:
    """Whether prompts wait that have room nowhere: one is larger than any instance's free memory, or all of them
    together than that of all. The figure doesn't see it: a few requests with long outputs fill the memory and leave
    many decode steps to each, while what waits can't begin. Memory that is only scattered isn't short: moves gather it.
    """
    free = [item.free for item in instances]
    blocked = [item.report for item in instances if item.report.waiting and item.report.head_demand > item.free]
    if not instances or not (blocked or held.total):
        return False
    largest = max([held.largest, *(report.head_demand for report in blocked)])
    total = held.total + sum(report.queued_demand for report in blocked)
    return largest > max(free) or total > max(0, sum(free))


def scale(
    instances: Sequence[InstanceObservation],
    state: ScalingState,
    settings: ScalingSettings,
    now_s: float,
    held: HeldDemand = NOTHING_HELD,
) -> tuple[ScalingDecision, ScalingState]:
    """One look at the live instances (the draining ones included), and at what waits for them at the scheduler. By the
    load as many are started at once as are missing; by decode steps one at a time, and the figure must stay beyond the
    range for `sustain_s` anew for the next. One is drained at a time."""
    serving = [item for item in instances if not item.is_draining]
    state = _after_starts(state, len(serving), settings, now_s)
    capacity = max((item.report.capacity for item in instances), default=0)
    freeness = cluster_freeness(serving, settings.figure, len(state.starting), capacity)
    demand = demand_of(instances, held)
    short = settings.shortage and bool(serving) and is_short(serving, held)
    growth = 0
    if settings.figure == "load":
        takes_s = settings.start_after(state.start_s)
        state = replace(state, trend=state.trend.after(demand, now_s, takes_s))
        growth = round(settings.foresight * state.trend.growth(demand, now_s, takes_s))
        wanted = wanted_instances(demand + growth, serving, settings)
        state = _after_demand(state, wanted, len(serving), short, settings, now_s)
        action, count, why = _decide_by_load(state, wanted, (demand, growth), len(serving), settings, now_s)
    else:
        state = _after_figure(state, freeness, short, settings, now_s)
        action, why = _decide(state, freeness, len(serving), settings, now_s)
        count = 1
    action, owner, why = _whom(action, serving, settings, why)
    drainable = tuple((item.owner, item.report.running) for item in serving) if owner is not None else ()
    dry_run, begun = settings.dry_run, len(state.starting)
    decision = ScalingDecision(
        action,
        owner,
        freeness,
        why,
        dry_run,
        len(serving),
        begun,
        drainable,
        count=count,
        demand=demand,
        growth=growth,
    )
    return decision, _after_decision(state, decision, now_s)


def _whom(
    action: ScalingAction, serving: Sequence[InstanceObservation], settings: ScalingSettings, why: str
) -> tuple[ScalingAction, Owner | None, str]:
    """The idlest is drained, if the others can take what it holds."""
    if action is not ScalingAction.DRAIN:
        return action, None, why
    idlest = min(serving, key=lambda item: (item.report.running, item.report.used, item.owner))
    room = sum(item.free for item in serving if item is not idlest)
    if settings.shortage and room < idlest.report.used:
        return ScalingAction.NOTHING, None, f"{why}, but the others have no room for what the idlest one holds"
    return action, idlest.owner, why


def _after_decision(state: ScalingState, decision: ScalingDecision, now_s: float) -> ScalingState:
    """What a dry run told it tells again after as long as it takes to be sure."""
    if decision.action is ScalingAction.START:
        begun = state.starting if decision.dry_run else (*state.starting, *[now_s] * decision.count)
        return replace(state, starting=begun, low_since_s=now_s, short_since_s=now_s)
    if decision.action is ScalingAction.NOTHING:
        return state
    if decision.dry_run:
        return replace(state, high_since_s=now_s, peaks=NO_PEAKS, peaks_since_s=now_s)
    return replace(state, high_since_s=now_s, known=state.known - 1)


def _after_starts(state: ScalingState, serving: int, settings: ScalingSettings, now_s: float) -> ScalingState:
    arrived = max(0, serving - state.known)
    starting = [begun for begun in state.starting[arrived:] if now_s - begun < settings.start_timeout_s]
    came = state.starting[:arrived]
    start_s = now_s - came[0] if came else state.start_s
    return replace(state, starting=tuple(starting), known=serving, start_s=start_s)


def _after_demand(
    state: ScalingState, wanted: int, serving: int, short: bool, settings: ScalingSettings, now_s: float
) -> ScalingState:
    missing = wanted > serving + len(state.starting)
    return replace(
        state,
        low_since_s=_since(state.low_since_s, missing, now_s),
        peaks=state.peaks.after(wanted, now_s, settings.calm_after(state.start_s)),
        peaks_since_s=now_s if state.peaks_since_s is None else state.peaks_since_s,
        short_since_s=_since(state.short_since_s, short, now_s),
    )


def _after_figure(
    state: ScalingState, freeness: float, short: bool, settings: ScalingSettings, now_s: float
) -> ScalingState:
    return replace(
        state,
        low_since_s=_since(state.low_since_s, freeness < settings.low, now_s),
        high_since_s=_since(state.high_since_s, freeness > settings.high and not short, now_s),
        short_since_s=_since(state.short_since_s, short, now_s),
    )


def _since(before_s: float | None, holds: bool, now_s: float) -> float | None:
    if not holds:
        return None
    return now_s if before_s is None else before_s


def _lasts(since_s: float | None, settings: ScalingSettings, now_s: float) -> bool:
    return since_s is not None and now_s - since_s >= settings.sustain_s


def _decide_by_load(
    state: ScalingState,
    wanted: int,
    tokens: tuple[int, int],
    serving: int,
    settings: ScalingSettings,
    now_s: float,
) -> tuple[ScalingAction, int, str]:
    """`tokens`: held or waited for now, and more of them soon."""
    total = serving + len(state.starting)
    demand, growth = tokens
    soon = f" and {growth} more soon" if growth else ""
    figure = f"{demand} tokens held or waited for{soon}, {serving} instances and {total - serving} starting"
    if total < settings.instances_min:
        return ScalingAction.START, settings.instances_min - total, f"fewer than {settings.instances_min}: {figure}"
    # Requests hold memory for seconds: what is wanted for a moment is wanted. A dry run doesn't say it at each look.
    if wanted > total and (_lasts(state.low_since_s, settings, now_s) or not settings.dry_run):
        return ScalingAction.START, wanted - total, f"{wanted} are wanted: {figure}"
    if total == serving < settings.instances_max and _lasts(state.short_since_s, settings, now_s):
        return ScalingAction.START, 1, f"prompts wait that have room nowhere: {figure}"
    calm_s = settings.calm_after(state.start_s)
    calm = state.peaks_since_s is not None and now_s - state.peaks_since_s >= calm_s
    if calm and state.peaks.most < serving == total and state.short_since_s is None:
        return ScalingAction.DRAIN, 1, f"{state.peaks.most} were wanted at most for {calm_s:g} s: {figure}"
    return ScalingAction.NOTHING, 1, f"{wanted} are wanted: {figure}"


def _decide(
    state: ScalingState, freeness: float, serving: int, settings: ScalingSettings, now_s: float
) -> tuple[ScalingAction, str]:
    total = serving + len(state.starting)
    figure = f"freeness {freeness:.1f} of {serving} instances and {total - serving} starting"
    if total < settings.instances_min:
        return ScalingAction.START, f"{total} instances, at least {settings.instances_min} are wanted"
    since = (state.low_since_s, state.short_since_s, state.high_since_s)
    low, short, high = (_lasts(since_s, settings, now_s) for since_s in since)
    if (low or short) and total >= settings.instances_max:
        return ScalingAction.NOTHING, f"{figure}: too low, but {total} are the most allowed"
    if low:
        return ScalingAction.START, f"{figure} is below {settings.low:g}"
    if short and total == serving:
        # What is starting will take what waits; only then it shows whether that is enough.
        return ScalingAction.START, f"prompts wait that have room nowhere; {figure}"
    if high:
        # What is starting was asked for a moment ago; taking another away at once would be a swing.
        if total > serving or serving <= settings.instances_min:
            return ScalingAction.NOTHING, f"{figure} is above {settings.high:g}, but no instance can be spared"
        return ScalingAction.DRAIN, f"{figure} is above {settings.high:g}"
    return ScalingAction.NOTHING, f"{figure} is in the range, or not for long enough beyond it"
