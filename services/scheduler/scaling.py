"""Does what the scaling policy decides, through launchers. It remembers nothing that a new scheduler would miss: what
is starting is what launchers say, and a launch names how many there shall be."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from meshift.schemas import subjects
from meshift.schemas.errors import MeshError, Stale
from meshift.schemas.identity import Owner
from meshift.schemas.instances import DrainReply, DrainRequest
from meshift.schemas.launching import LauncherReport, LaunchReply, LaunchRequest, LaunchState, ReleaseRequest
from meshift.schemas.steering import DecisionSubject
from meshift.services.bus.base import Bus
from meshift.services.scheduler.counters import SchedulerCounters
from meshift.services.scheduler.decisions import DecisionLog
from meshift.services.scheduler.policy.demand import HeldDemand
from meshift.services.scheduler.policy.observation import InstanceObservation
from meshift.services.scheduler.policy.scaling import ScalingAction, ScalingDecision, ScalingState, scale
from meshift.services.scheduler.policy.settings import ScalingSettings

logger = logging.getLogger(__name__)

ORDER_TIMEOUT_S = 5.0
REPORTS_MISSED_S = 3.0
"""Silence after which a launcher counts as gone."""

Observe = Callable[[], list[InstanceObservation]]


@dataclass(frozen=True, slots=True)
class HeardLauncher:
    """A launcher's newest report, and when it came."""

    report: LauncherReport
    at_s: float


def instances_to_come(
    launchers: Sequence[HeardLauncher], live: Sequence[Owner], now_s: float
) -> tuple[tuple[float, ...], frozenset[str]]:
    """When those began to start that haven't reported yet; and the names of those that are being released. An instance
    that its launcher calls ready is to come until it reports."""
    names = {owner.instance_id for owner in live}
    begun, released = [], set()
    for heard in launchers:
        for item in heard.report.instances:
            if item.state is LaunchState.RELEASING:
                released.add(item.instance_id)
            elif item.instance_id not in names:
                begun.append(heard.at_s - item.state_s)
    return tuple(sorted(min(when_s, now_s) for when_s in begun)), frozenset(released)


def start_takes_s(launchers: Sequence[HeardLauncher]) -> float | None:
    """How long the last start took, of the launcher where it took longest; None: none was seen."""
    return max((heard.report.start_s for heard in launchers if heard.report.start_s > 0), default=None)


def launcher_for(launchers: Sequence[HeardLauncher]) -> tuple[LauncherReport | None, str]:
    """Who has the most room for one more, and if nobody has, why."""
    if not launchers:
        return None, "no launcher is there"
    able = [heard.report for heard in launchers if not _objection(heard.report)]
    if able:
        return max(able, key=lambda report: (report.instances_max - len(report.instances), report.launcher_id)), ""
    return None, "; ".join(f"{heard.report.launcher_id}: {_objection(heard.report)}" for heard in launchers)


def _objection(report: LauncherReport) -> str:
    if report.backoff_s > 0:
        return f"starts fail ({report.last_failure.splitlines()[0] if report.last_failure else 'no reason given'})"
    if len(report.instances) >= report.instances_max:
        return f"it runs {len(report.instances)}, the most that it may have"
    return ""


class Scaler:
    """Of one scheduler. `look` is called at intervals; one order at a time is under way."""

    def __init__(
        self,
        scheduler_id: str,
        incarnation: int,
        bus: Bus,
        observe: Observe,
        held: Callable[[str], HeldDemand],
        counters: SchedulerCounters,
        decisions: DecisionLog,
        drain_deadline_s: float,
    ) -> None:
        self._id = scheduler_id
        self._incarnation = incarnation
        self._bus = bus
        self._observe = observe
        self._held = held
        self._counters = counters
        self._decisions = decisions
        self._drain_deadline_s = drain_deadline_s
        self._launchers: dict[str, HeardLauncher] = {}
        self._states: dict[str, ScalingState] = {}
        self._order: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Hear launchers."""
        self._bus.subscribe(subjects.LAUNCHER, LauncherReport, self._on_launcher)

    def stop(self) -> None:
        """Give up the order that is under way."""
        if self._order is not None:
            self._order.cancel()

    def look(self, settings: ScalingSettings, now_s: float) -> None:
        """Decide for each model that launchers serve, and act. Nothing is decided while an order is under way."""
        if not settings.enabled:
            self._states.clear()
            return
        self._expire(now_s)
        observations = self._observe()
        models = {heard.report.model for heard in self._launchers.values()}
        for model in sorted(models or {item.report.model.name for item in observations}):
            if self._order is None:
                self._look_at(model, observations, settings, now_s)

    def _look_at(
        self, model: str, observations: Sequence[InstanceObservation], settings: ScalingSettings, now_s: float
    ) -> None:
        launchers = [heard for heard in self._by_id() if heard.report.model == model]
        instances = [item for item in observations if item.report.model.name == model]
        begun, released = instances_to_come(launchers, [item.owner for item in instances], now_s)
        # What is being released takes no more and counts no more, also before its own report says that it drains.
        counted = [item for item in instances if item.owner.instance_id not in released]
        serving = sum(not item.is_draining for item in counted)
        before = replace(
            self._states.get(model, ScalingState()), starting=begun, known=serving, start_s=start_takes_s(launchers)
        )
        decision, self._states[model] = scale(counted, before, settings, now_s, self._held(model))
        decision, launcher = self._possible(decision, launchers)
        self._decisions.look(DecisionSubject.SCALING, decision, now_s, model)
        if decision.action is ScalingAction.NOTHING:
            return
        self._decisions.add(DecisionSubject.SCALING, decision, 1, now_s, model)
        self._counters.scaled(decision.action, decision.dry_run)
        logger.info("%s%s: %s", "dry run: " if decision.dry_run else "", decision.explain().decision, decision.why)
        if not decision.dry_run:
            self._begin(decision, launcher, settings)

    @staticmethod
    def _possible(
        decision: ScalingDecision, launchers: Sequence[HeardLauncher]
    ) -> tuple[ScalingDecision, LauncherReport | None]:
        """What can be done of it: a start needs a launcher that may; a dry run needs none."""
        if decision.action is ScalingAction.START:
            launcher, objection = launcher_for(launchers)
            if launcher is None and not decision.dry_run:
                return replace(decision, action=ScalingAction.NOTHING, why=f"{decision.why}, but {objection}"), None
            return decision, launcher
        owner = decision.owner
        runs = [heard.report for heard in launchers if owner is not None and _runs(heard.report, owner)]
        return decision, runs[0] if runs else None

    def _begin(self, decision: ScalingDecision, launcher: LauncherReport | None, settings: ScalingSettings) -> None:
        self._order = asyncio.get_running_loop().create_task(self._act(decision, launcher, settings))
        self._order.add_done_callback(self._after)

    async def _act(self, decision: ScalingDecision, launcher: LauncherReport | None, settings: ScalingSettings) -> None:
        try:
            if decision.action is ScalingAction.START and launcher is not None:
                for _ in range(decision.count):
                    await self._launch(launcher, settings)
                    launcher = self._roomiest(launcher.model)
                    if launcher is None:
                        break
            elif decision.owner is not None:
                await self._release(decision.owner, launcher)
        except MeshError as error:
            self._counters.scaling_failures += 1
            level = logging.ERROR if isinstance(error, Stale) else logging.WARNING
            logger.log(level, "%s failed: %s", decision.explain().decision, error)

    def _roomiest(self, model: str) -> LauncherReport | None:
        return launcher_for([heard for heard in self._by_id() if heard.report.model == model])[0]

    async def _launch(self, launcher: LauncherReport, settings: ScalingSettings) -> None:
        held = sum(item.state is not LaunchState.RELEASING for item in launcher.instances)
        request = LaunchRequest(
            scheduler_id=self._id,
            incarnation=self._incarnation,
            instances=held + 1,
            timeout_s=settings.start_timeout_s,
        )
        subject = subjects.launcher_launch(launcher.launcher_id)
        self._heard(await self._bus.request(subject, request, LaunchReply, timeout_s=ORDER_TIMEOUT_S))

    async def _release(self, owner: Owner, launcher: LauncherReport | None) -> None:
        """By its launcher; one that none runs leaves by itself when it has drained."""
        deadline_s = self._drain_deadline_s
        if launcher is None:
            subject = subjects.worker_drain(owner.instance_id)
            order = DrainRequest(deadline_s=deadline_s)
            await self._bus.request(subject, order, DrainReply, timeout_s=ORDER_TIMEOUT_S)
            return
        request = ReleaseRequest(
            scheduler_id=self._id, incarnation=self._incarnation, owner=owner, deadline_s=deadline_s
        )
        subject = subjects.launcher_release(launcher.launcher_id)
        self._heard(await self._bus.request(subject, request, LaunchReply, timeout_s=ORDER_TIMEOUT_S))

    def _after(self, task: asyncio.Task[None]) -> None:
        self._order = None
        if not task.cancelled() and task.exception() is not None:
            logger.error("scaling failed unexpectedly", exc_info=task.exception())

    # ---- launchers

    def _heard(self, reply: LaunchReply) -> None:
        self._on_launcher(reply.report)

    def _on_launcher(self, report: LauncherReport) -> None:
        known = self._launchers.get(report.launcher_id)
        newest = (0, 0) if known is None else (known.report.incarnation, known.report.sequence)
        if (report.incarnation, report.sequence) > newest:
            self._launchers[report.launcher_id] = HeardLauncher(report, asyncio.get_running_loop().time())

    def _expire(self, now_s: float) -> None:
        for name, heard in list(self._launchers.items()):
            if now_s - heard.at_s > REPORTS_MISSED_S:
                del self._launchers[name]

    def _by_id(self) -> list[HeardLauncher]:
        return [self._launchers[name] for name in sorted(self._launchers)]


def _runs(report: LauncherReport, owner: Owner) -> bool:
    return any(item.instance_id == owner.instance_id for item in report.instances)
