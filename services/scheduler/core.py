"""The scheduler service: keeps the view, answers dispatches. No durable state: load reports rebuild it."""

import asyncio

from pydantic import BaseModel, Field

from meshift.schemas import subjects
from meshift.schemas.errors import MeshError, NotFound, Unavailable
from meshift.schemas.identity import Owner
from meshift.schemas.instances import (
    DispatchReply,
    DispatchRequest,
    InstanceGone,
    LoadReport,
    SchedulerReport,
)
from meshift.services.bus.base import Bus, ServiceInfo
from meshift.services.instances import InstanceView
from meshift.services.periodic import Periodic
from meshift.services.scheduler.charges import Charges
from meshift.services.scheduler.counters import FITS, WAITS, SchedulerCounters
from meshift.services.scheduler.policy.dispatch import Candidate, DispatchDecision, choose_instance
from meshift.tracing import names
from meshift.tracing.spans import NO_TRACER, Attributes, SpanKind, Tracer, child


class SchedulerOptions(BaseModel):
    """Timing of the scheduler."""

    report_interval_s: float = Field(0.5, gt=0, description="how often it says that it lives")
    instance_timeout_s: float = Field(2.0, gt=0, description="silence after which an instance is taken for lost")


class SchedulerCore:
    """One scheduler on a bus."""

    def __init__(
        self, scheduler_id: str, incarnation: int, bus: Bus, options: SchedulerOptions, *, tracer: Tracer = NO_TRACER
    ) -> None:
        self._id = subjects.check_name(scheduler_id)
        self._incarnation = incarnation
        self.counters = SchedulerCounters()
        self._tracer = tracer
        self._bus = bus
        self._view = InstanceView(options.instance_timeout_s)
        self._charges = Charges()
        self._turn = 0
        self._periodic = Periodic(options.report_interval_s, self._report)

    async def start(self) -> None:
        """Join the bus. Dispatches are answered as soon as instances have reported."""
        self._bus.subscribe(subjects.LOAD, LoadReport, self._on_report)
        self._bus.subscribe(subjects.INSTANCE_GONE, InstanceGone, self._on_gone)
        self._bus.serve("dispatch", subjects.DISPATCH, DispatchRequest, self._on_dispatch)
        await self._bus.start(ServiceInfo("scheduler", self._id, "global scheduler: dispatches requests"))
        self._report()
        self._periodic.start()

    async def stop(self) -> None:
        """Leave the bus. Idempotent."""
        self._periodic.stop()
        await self._bus.close()

    def instances(self) -> list[LoadReport]:
        """The newest reports of the live instances."""
        return [known.report for known in self._view]

    def _on_report(self, report: LoadReport) -> None:
        for lost in self._view.on_report(report, self._now_s()):
            self._charges.forget(lost)
        self._charges.on_report(report.owner)

    def _on_gone(self, gone: InstanceGone) -> None:
        self._view.on_gone(gone.owner)
        self._charges.forget(gone.owner)

    def _on_dispatch(self, request: DispatchRequest) -> DispatchReply:
        begin_s = self._now_s()
        self._expire()
        try:
            decision = self._decide(request) if self._tracer is NO_TRACER else self._decide_traced(request)
        except MeshError as error:
            self.counters.decided(error.code, self._now_s() - begin_s)
            raise
        self._turn += 1
        self._charges.charge(decision.owner, request.demand)
        self.counters.decided(FITS if decision.fits else WAITS, self._now_s() - begin_s)
        return DispatchReply(
            owner=decision.owner,
            scheduler_id=self._id,
            incarnation=self._incarnation,
            reason=decision.reason,
        )

    def _decide_traced(self, request: DispatchRequest) -> DispatchDecision:
        attributes: Attributes = {
            names.REQUEST_ID: request.request_id,
            names.ATTEMPT: request.attempt,
            names.REQUEST_MODEL: request.model,
            names.DISPATCH_DEMAND: request.demand,
            names.DISPATCH_CANDIDATES: len(self._candidates(request.model, request.excluded)),
        }
        with child(self._tracer, names.DECIDE, attributes, kind=SpanKind.SERVER) as span:
            decision = self._decide(request)
            span.set_attribute(names.OWNER, str(decision.owner))
            span.set_attribute(names.DISPATCH_REASON, decision.reason)
            return decision

    def _decide(self, request: DispatchRequest) -> DispatchDecision:
        candidates = self._candidates(request.model, request.excluded)
        decision = choose_instance(candidates, request.demand, self._turn)
        if decision is None:
            raise self._nowhere(request.model)
        return decision

    def _candidates(self, model: str, excluded: tuple[Owner, ...]) -> list[Candidate]:
        return [
            Candidate(known.report, *self._charges.charged(known.owner))
            for known in self._view
            if known.takes_requests and known.report.model.name == model and known.owner not in excluded
        ]

    def _nowhere(self, model: str) -> NotFound | Unavailable:
        served = sorted({known.report.model.name for known in self._view})
        if served and model not in served:
            return NotFound(f"model {model!r} is not served; there is {', '.join(served)}", param="model")
        return Unavailable(f"no instance of {model!r} takes requests now")

    def _report(self) -> None:
        self._expire()
        report = SchedulerReport(scheduler_id=self._id, incarnation=self._incarnation, instances=len(self._view))
        self._bus.publish(subjects.SCHEDULER, report)

    def _expire(self) -> None:
        for owner in self._view.expire(self._now_s()):
            self._charges.forget(owner)

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()
