"""The scheduler service: keeps the view, answers dispatches. No durable state: load reports rebuild it."""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from pydantic import BaseModel, Field

from meshift.schemas import subjects
from meshift.schemas.errors import MeshError, NotFound, Unavailable
from meshift.schemas.identity import Owner
from meshift.schemas.instances import (
    DispatchReply,
    DispatchRequest,
    InstanceGone,
    InstanceState,
    LoadReport,
    SchedulerReport,
)
from meshift.schemas.steering import DecisionSubject
from meshift.services.bus.base import Bus, ServiceInfo
from meshift.services.instances import InstanceView, KnownInstance
from meshift.services.periodic import Periodic
from meshift.services.scheduler.charges import Charges
from meshift.services.scheduler.counters import FITS, HELD, WAITS, SchedulerCounters
from meshift.services.scheduler.decisions import DecisionLog
from meshift.services.scheduler.dispatching import DispatchIndexes, seen_by
from meshift.services.scheduler.headroom import Headrooms
from meshift.services.scheduler.holding import Holding
from meshift.services.scheduler.migration import Migration
from meshift.services.scheduler.operators import OperatorEndpoints
from meshift.services.scheduler.policy.demand import HeldDemand
from meshift.services.scheduler.policy.dispatch import DispatchDecision, choose_instance
from meshift.services.scheduler.policy.observation import InstanceObservation
from meshift.services.scheduler.policy.pairing import PairingPlan, PairingRounds
from meshift.services.scheduler.policy.settings import PolicySettings
from meshift.services.scheduler.policy.snapshots import kept_observations
from meshift.services.scheduler.scaling import Scaler
from meshift.services.scheduler.steering import Steering
from meshift.services.scheduler.traces import describe_decision
from meshift.tracing import names
from meshift.tracing.spans import NO_TRACER, Attributes, SpanKind, Tracer, child

ASKED_AGAIN_S = 0.05
"""A dispatch that has waited for longer was told to wait before: that is remembered once."""


class SchedulerOptions(BaseModel):
    """Timing and policy of the scheduler."""

    report_interval_s: float = Field(0.5, gt=0, description="how often it says that it lives")
    instance_timeout_s: float = Field(2.0, gt=0, description="silence after which an instance is taken for lost")
    scaling_interval_s: float = Field(1.0, gt=0, description="how often it looks whether instances are wanted or spare")
    scaling_drain_s: float = Field(
        600.0, ge=0, le=86_400, description="how long a spare instance may wait for requests that don't move away"
    )
    scheduling: PolicySettings = Field(default_factory=PolicySettings, description="the policies' own settings")


class SchedulerCore:
    """One scheduler on a bus."""

    def __init__(
        self, scheduler_id: str, incarnation: int, bus: Bus, options: SchedulerOptions, *, tracer: Tracer = NO_TRACER
    ) -> None:
        self._now_s = asyncio.get_running_loop().time
        self._id = subjects.check_name(scheduler_id)
        self._incarnation = incarnation
        self.counters = SchedulerCounters()
        self._tracer = tracer
        self._bus = bus
        self._view = InstanceView(options.instance_timeout_s)
        self._charges = Charges()
        self._rounds = PairingRounds()
        self._observed: dict[Owner, InstanceObservation] = {}
        """Of live instances, as far as nothing of them has changed since."""
        self._indexes = DispatchIndexes(self._candidates, self._observe_owner)
        self._turn = 0
        self.steering = Steering(incarnation, options.scheduling)
        self.decisions = DecisionLog()
        self._headrooms = Headrooms(self.decisions)
        self._operators = OperatorEndpoints(
            scheduler_id, incarnation, self.steering, self.decisions, self._on_new_policy
        )
        self._holding = Holding(self._decide_and_charge)
        self._migration = Migration(scheduler_id, incarnation, bus, self.counters, self.decisions, self._changed)
        self._scaler = Scaler(
            scheduler_id,
            incarnation,
            bus,
            self.observations,
            self.held_demand,
            self.counters,
            self.decisions,
            options.scaling_drain_s,
        )
        self._periodic = Periodic(options.report_interval_s, self._report)
        self._looks = Periodic(options.scaling_interval_s, self._look)

    async def start(self) -> None:
        """Join the bus. Dispatches are answered as soon as instances have reported."""
        self._bus.subscribe(subjects.LOAD, LoadReport, self._on_report)
        self._bus.subscribe(subjects.INSTANCE_GONE, InstanceGone, self._on_gone)
        self._bus.serve("dispatch", subjects.DISPATCH, DispatchRequest, self._on_dispatch)
        self._operators.serve(self._bus)
        self._scaler.start()
        await self._bus.start(ServiceInfo("scheduler", self._id, "global scheduler: dispatches requests"))
        self._report()
        self._periodic.start()
        self._looks.start()

    async def stop(self) -> None:
        """Leave the bus. Idempotent."""
        self._periodic.stop()
        self._looks.stop()
        self._scaler.stop()
        self._holding.release()
        await self._bus.close()

    def instances(self) -> list[LoadReport]:
        """The newest reports of the live instances."""
        return [known.report for known in self._view]

    def observations(self) -> list[InstanceObservation]:
        """The live instances, as decisions see them."""
        return [self._observe(known) for known in self._view]

    def _observe(self, known: KnownInstance) -> InstanceObservation:
        owner = known.report.owner
        seen = self._observed.get(owner)
        if seen is None:
            tokens, requests = self._charges.charged(owner)
            moving_in, blocked_s = self._migration.moving_in(owner), self._migration.blocked_s(owner)
            granted, stalled = self._headrooms.granted(owner), self._headrooms.is_stalled(owner)
            seen = self._observed[owner] = InstanceObservation(
                known.report, tokens, requests, moving_in, blocked_s, granted=granted, stalled=stalled
            )
        return seen

    def _observe_owner(self, owner: Owner) -> InstanceObservation | None:
        known = self._view.get(owner)
        return None if known is None else self._observe(known)

    def _changed(self, owner: Owner) -> None:
        """Its report, or what is charged to it, is another."""
        self._observed.pop(owner, None)
        self._indexes.changed(owner)

    @property
    def settings(self) -> PolicySettings:
        """The policy that is in force."""
        return self.steering.settings

    def _on_new_policy(self) -> None:
        """Who waits may have a place under the new settings; frontends hear of them at once."""
        self._plan_headroom(self._models())
        self._holding.pump()
        self._report()

    def plans(self) -> Mapping[str, PairingPlan]:
        """The newest migration plan of each model."""
        return self._migration.plans

    def held_demand(self, model: str) -> HeldDemand:
        """Tokens of dispatches that wait for room at that model's instances."""
        return self._holding.demand(model)

    def held(self) -> int:
        """Dispatches that wait for room."""
        return len(self._holding)

    def _on_report(self, report: LoadReport) -> None:
        now_s, view = self._now_s(), self._view
        before = view.get(report.owner)
        serves = None if before is None else (before.report.state, before.report.model.name)
        for lost in view.on_report(report, now_s):
            self._forget(lost)
        if before is None and view.get(report.owner) is None:
            return
        self._observed.pop(report.owner, None)
        if serves == (report.state, report.model.name):
            self._indexes.changed(report.owner)
        else:
            self._indexes.reset()
        self._charges.on_report(report.owner)
        self._migration.on_report(report, now_s)
        self._headrooms.on_report(report, now_s)
        if self._rounds.on_report(report.owner, len(view)):
            self._on_round(self._rounds.take())

    def _on_round(self, fresh: frozenset[Owner]) -> None:
        """All have reported. Who waits is placed first; what is left may take moves."""
        models = self._models()
        self._plan_headroom(models)
        self._holding.pump()
        if self.settings.moves:
            self._migration.run(models, partial(self._movable, fresh), self.settings, self._now_s())

    def _plan_headroom(self, models: Sequence[str]) -> None:
        for owner in self._headrooms.plan(models, self._candidates, self.settings, self._now_s()):
            self._changed(owner)

    def _models(self) -> list[str]:
        return sorted({known.report.model.name for known in self._view})

    def _movable(self, fresh: frozenset[Owner], model: str) -> list[InstanceObservation]:
        states = (InstanceState.READY, InstanceState.DRAINING)
        return [
            self._observe(known)
            for known in self._view
            if known.report.owner in fresh and known.report.model.name == model and known.report.state in states
        ]

    def _on_gone(self, gone: InstanceGone) -> None:
        self._view.on_gone(gone.owner)
        self._forget(gone.owner)

    def _forget(self, owner: Owner) -> None:
        self._observed.pop(owner, None)
        self._indexes.reset()
        self._charges.forget(owner)
        self._rounds.forget(owner)
        self._migration.forget(owner)
        self._headrooms.forget(owner)

    def _on_dispatch(self, request: DispatchRequest) -> DispatchReply | Coroutine[Any, Any, DispatchReply]:
        begin_s = self._now_s()
        self._expire()
        try:
            decision = self._decide_traced(request) if self._tracer is not NO_TRACER else self._decide(request)
        except MeshError as error:
            self.counters.decided(error.code, self._now_s() - begin_s)
            raise
        if decision.owner is None:
            if request.waited_s < ASKED_AGAIN_S:
                self._remember(request, decision)
            return self._hold(request, decision, begin_s)
        self._charge(request, decision)
        return self._answer(decision, begin_s)

    async def _hold(self, request: DispatchRequest, decision: DispatchDecision, begin_s: float) -> DispatchReply:
        hold_s = self.settings.dispatch.hold_s_max
        placed = await self._holding.wait(request, self._now_s(), hold_s)
        if isinstance(placed, DispatchDecision):
            return self._answer(placed, begin_s)
        return self._answer(decision, begin_s, placed)

    def _answer(self, decision: DispatchDecision, begin_s: float, ask_again_s: float = 0.0) -> DispatchReply:
        if decision.owner is None:
            self.counters.decided(HELD, self._now_s() - begin_s)
        else:
            self.counters.decided(FITS if decision.fits else WAITS, self._now_s() - begin_s)
        return DispatchReply(
            owner=decision.owner,
            scheduler_id=self._id,
            incarnation=self._incarnation,
            reason=decision.reason,
            ask_again_s=ask_again_s,
        )

    def _decide_and_charge(self, request: DispatchRequest) -> DispatchDecision:
        decision = self._decide(request)
        self._charge(request, decision)
        return decision

    def _charge(self, request: DispatchRequest, decision: DispatchDecision) -> None:
        if decision.owner is not None:
            self._turn += 1
            self._charges.charge(decision.owner, request.demand)
            self._changed(decision.owner)
            self._remember(request, decision)

    def _remember(self, request: DispatchRequest, decision: DispatchDecision) -> None:
        self.decisions.add(
            DecisionSubject.DISPATCH,
            decision,
            kept_observations(decision.instances),
            self._now_s(),
            request.model,
            request.request_id,
            request.attempt,
        )

    def _decide_traced(self, request: DispatchRequest) -> DispatchDecision:
        attributes: Attributes = {
            names.REQUEST_ID: request.request_id,
            names.ATTEMPT: request.attempt,
            names.REQUEST_MODEL: request.model,
            names.DISPATCH_DEMAND: request.demand,
        }
        with child(self._tracer, names.DECIDE, attributes, kind=SpanKind.SERVER) as span:
            decision = self._decide(request)
            span.set_attributes(describe_decision(decision))
            return decision

    def _decide(self, request: DispatchRequest) -> DispatchDecision:
        settings, execution = self.settings, request.priority.execution
        may_wait, waited_s = request.may_wait, request.waited_s
        if request.excluded:
            # Seldom: after a failure. Places and turns are then those of the others.
            candidates = [item for item in self._candidates(request.model) if item.owner not in request.excluded]
            seen = seen_by(execution, candidates) if settings.sees_classes else candidates
            decision = choose_instance(seen, request.demand, self._turn, settings, may_wait=may_wait, waited_s=waited_s)
        else:
            decision = self._indexes.choose(
                request.model,
                request.demand,
                self._turn,
                settings,
                may_wait=may_wait,
                execution=execution,
                waited_s=waited_s,
            )
        if decision is None:
            raise self._nowhere(request.model)
        return decision

    def _candidates(self, model: str) -> list[InstanceObservation]:
        return [
            self._observe(known) for known in self._view if known.takes_requests and known.report.model.name == model
        ]

    def _nowhere(self, model: str) -> NotFound | Unavailable:
        served = sorted({known.report.model.name for known in self._view})
        if served and model not in served:
            return NotFound(f"model {model!r} is not served; there is {', '.join(served)}", param="model")
        return Unavailable(f"no instance of {model!r} takes requests now")

    def _look(self) -> None:
        self._expire()
        self._scaler.look(self.settings.scaling, self._now_s())

    def _report(self) -> None:
        self._expire()
        report = SchedulerReport(
            scheduler_id=self._id,
            incarnation=self._incarnation,
            instances=len(self._view),
            policy=self.steering.stamp,
        )
        self._bus.publish(subjects.SCHEDULER, report)

    def _expire(self) -> None:
        for owner in self._view.expire(self._now_s()):
            self._forget(owner)
