"""The scheduler service: keeps the view, answers dispatches. No durable state: load reports rebuild it."""

import asyncio

from pydantic import BaseModel, Field

from meshift.schemas import subjects
from meshift.schemas.errors import NotFound, Unavailable
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
from meshift.services.scheduler.policy.dispatch import Candidate, choose_instance


class SchedulerOptions(BaseModel):
    """Timing of the scheduler."""

    report_interval_s: float = Field(0.5, gt=0, description="how often it says that it lives")
    instance_timeout_s: float = Field(2.0, gt=0, description="silence after which an instance is taken for lost")


class SchedulerCore:
    """One scheduler on a bus."""

    def __init__(self, scheduler_id: str, incarnation: int, bus: Bus, options: SchedulerOptions) -> None:
        self._id = subjects.check_name(scheduler_id)
        self._incarnation = incarnation
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
        self._expire()
        candidates = self._candidates(request.model, request.excluded)
        decision = choose_instance(candidates, request.demand, self._turn)
        if decision is None:
            raise self._nowhere(request.model)
        self._turn += 1
        self._charges.charge(decision.owner, request.demand)
        return DispatchReply(
            owner=decision.owner,
            scheduler_id=self._id,
            incarnation=self._incarnation,
            reason=decision.reason,
        )

    def _candidates(self, model: str, excluded: tuple[Owner, ...]) -> list[Candidate]:
        return [
            Candidate(known.report, self._charges.charged(known.owner))
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
