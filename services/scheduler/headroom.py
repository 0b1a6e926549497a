"""Keeps how much headroom counts at each instance, from one round of reports to the next, and which engines are at a
long prompt. Of what reports say, so a new scheduler has it after a round."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from meshift.schemas.identity import Owner
from meshift.schemas.instances import LoadReport
from meshift.schemas.steering import DecisionSubject
from meshift.services.scheduler.decisions import DecisionLog
from meshift.services.scheduler.policy.headroom import plan_headroom
from meshift.services.scheduler.policy.observation import InstanceObservation
from meshift.services.scheduler.policy.settings import PolicySettings

STALLED_S, STALLED_STEPS = 0.09, 1.25
"""An engine that runs something and has ended no step in this time, nor in so many times what its last ones took, is at
a long prompt."""


@dataclass(slots=True)
class _Steps:
    """Of one engine, as reports show them."""

    count: int
    since_s: float
    """When that was first seen."""
    step_s: float = 0.0
    """How long each of the last ones took."""


class Headrooms:
    """Of one scheduler."""

    def __init__(self, decisions: DecisionLog) -> None:
        self._decisions = decisions
        self._granted: dict[Owner, int] = {}
        self._steps: dict[Owner, _Steps] = {}
        self._stalled: set[Owner] = set()
        self._asking: set[Owner] = set()

    def granted(self, owner: Owner) -> int | None:
        """How much of its headroom counts; None: all."""
        return self._granted.get(owner)

    def is_stalled(self, owner: Owner) -> bool:
        """As of its newest report."""
        return owner in self._stalled

    def on_report(self, report: LoadReport, now_s: float) -> None:
        """An instance reported."""
        steps = self._steps.setdefault(report.owner, _Steps(report.step_count, now_s))
        if report.step_count > steps.count and report.running:
            steps.step_s = (now_s - steps.since_s) / (report.step_count - steps.count)
        if report.step_count != steps.count or not report.running:
            steps.count, steps.since_s = report.step_count, now_s
        stalled_s = max(STALLED_S, STALLED_STEPS * steps.step_s)
        _put(self._stalled, report.owner, now_s - steps.since_s >= stalled_s)
        _put(self._asking, report.owner, report.headroom > 0)

    def plan(
        self,
        models: Iterable[str],
        observe: Callable[[str], Sequence[InstanceObservation]],
        settings: PolicySettings,
        now_s: float,
    ) -> Iterator[Owner]:
        """A round of reports is complete, or the settings are others. `observe` gives those that take requests.
        Returns the owners at which another headroom counts than before."""
        before, granted = self._granted, dict[Owner, int]()
        for model in models if settings.sees_classes else ():
            # Nobody is looked at while nobody asks.
            instances = observe(model) if self._asking else ()
            plan = plan_headroom(instances, settings.headroom)
            granted.update(plan.granted)
            self._decisions.look(DecisionSubject.HEADROOM, plan, now_s, model)
        self._granted = granted
        return (owner for owner in dict.fromkeys((*before, *granted)) if before.get(owner) != granted.get(owner))

    def forget(self, owner: Owner) -> None:
        """`owner` is gone."""
        self._granted.pop(owner, None)
        self._steps.pop(owner, None)
        self._stalled.discard(owner)
        self._asking.discard(owner)


def _put(owners: set[Owner], owner: Owner, belongs: bool) -> None:
    if belongs:
        owners.add(owner)
    else:
        owners.discard(owner)
