"""The coordinator service: changes the layouts of running instances. No durable state: what is under way is found in
load reports, and the workers know how far it is."""

import asyncio
import logging
from collections import deque

from meshift.schemas import subjects
from meshift.schemas.errors import NotFound
from meshift.schemas.identity import Owner
from meshift.schemas.instances import InstanceGone, LoadReport
from meshift.schemas.layouts import CHANGES_LISTED_MAX, LayoutRefusal
from meshift.schemas.reconfiguring import (
    ReconfigurationsReply,
    ReconfigurationsRequest,
    ReconfigureBody,
    ReconfigureCancel,
    ReconfigureOrder,
    ReconfigureOutcome,
    ReconfigureReport,
)
from meshift.services.bus.base import Bus, ServiceInfo
from meshift.services.coordinator.context import Context
from meshift.services.coordinator.counters import CoordinatorCounters
from meshift.services.coordinator.options import CoordinatorOptions
from meshift.services.coordinator.reconfiguration import Reconfiguration
from meshift.services.instances import InstanceView
from meshift.services.periodic import Periodic
from meshift.tracing.spans import NO_TRACER, Tracer

logger = logging.getLogger(__name__)

NAME_CHARS_MAX = 24
"""Of a coordinator's name in the names of its changes."""


class CoordinatorCore:
    """One coordinator on a bus."""

    def __init__(
        self,
        coordinator_id: str,
        incarnation: int,
        bus: Bus,
        options: CoordinatorOptions,
        *,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self._id = subjects.check_name(coordinator_id)
        self._incarnation = incarnation
        self._bus = bus
        self._view = InstanceView(options.instance_timeout_s)
        self._context = Context(bus, options, tracer, self._report_of)
        self._running: dict[str, Reconfiguration] = {}
        self._tasks: dict[asyncio.Task[ReconfigureReport], Reconfiguration] = {}
        self._ended: deque[ReconfigureReport] = deque(maxlen=CHANGES_LISTED_MAX)
        self._count = 0
        self._periodic = Periodic(options.look_interval_s, self._look)

    async def start(self) -> None:
        """Join the bus."""
        bus = self._bus
        bus.subscribe(subjects.LOAD, LoadReport, self._on_report)
        bus.subscribe(subjects.INSTANCE_GONE, InstanceGone, self._on_gone)
        bus.serve("reconfigure", subjects.RECONFIGURE, ReconfigureOrder, self._on_order)
        bus.serve("cancel", subjects.RECONFIGURE_CANCEL, ReconfigureCancel, self._on_cancel)
        bus.serve("reconfigurations", subjects.RECONFIGURATIONS, ReconfigurationsRequest, self._on_request)
        await bus.start(ServiceInfo("coordinator", self._id, "changes the layouts of running instances"))
        self._periodic.start()

    async def stop(self) -> None:
        """Leave the bus. What is under way goes on with the next coordinator, or is undone by its lease. Idempotent."""
        self._periodic.stop()
        for task in list(self._tasks):
            task.cancel()
        await self._bus.close()

    @property
    def counters(self) -> CoordinatorCounters:
        """Live counters."""
        return self._context.counters

    def running(self) -> list[ReconfigureReport]:
        """Those that are under way, by instance."""
        return [self._running[name].report() for name in sorted(self._running)]

    # ---- operators

    async def _on_order(self, order: ReconfigureOrder) -> ReconfigureReport:
        """Answered when it has begun or, if it is to `wait`, ended."""
        owner, body = self._live(order.instance_id), order.body
        running = self._running.get(order.instance_id)
        if running is not None and not body.dry_run:
            return self._busy(owner, running)
        task = self._start(owner, self._new_id(), body)
        if body.wait or body.dry_run:
            return await asyncio.shield(task)
        change = self._tasks[task]
        await asyncio.shield(change.begun)
        return change.report()

    def _on_cancel(self, cancel: ReconfigureCancel) -> ReconfigureReport:
        """Answered at once: how it ends is in `reconfigurations`."""
        running = self._running.get(cancel.instance_id)
        if running is None:
            raise NotFound(f"no change of {cancel.instance_id!r} is under way", param="instance_id")
        running.cancel("an operator cancelled it")
        return running.report()

    def _on_request(self, request: ReconfigurationsRequest) -> ReconfigurationsReply:
        wanted = request.instance_id
        return ReconfigurationsReply(
            coordinator_id=self._id,
            incarnation=self._incarnation,
            running=tuple(report for report in self.running() if wanted in (None, report.instance_id)),
            ended=tuple(report for report in self._ended if wanted in (None, report.instance_id)),
        )

    # ---- instances

    def _on_report(self, report: LoadReport) -> None:
        self._view.on_report(report, self._context.now_s())
        name = report.owner.instance_id
        if not report.layout_change or self._view.get(report.owner) is None or name in self._running:
            return
        known = next((ended for ended in self._ended if ended.change_id == report.layout_change), None)
        if known is not None and known.outcome is not ReconfigureOutcome.LOST:
            # This report was sent before it had ended, or a lost order has come to life: that one is undone by its
            # lease.
            return
        self.counters.adopted += 1
        logger.info("%s: going on with %s", report.owner, report.layout_change)
        self._start(report.owner, report.layout_change, None)

    def _on_gone(self, gone: InstanceGone) -> None:
        self._view.on_gone(gone.owner)

    def _look(self) -> None:
        self._view.expire(self._context.now_s())

    def _live(self, instance_id: str) -> Owner:
        for known in self._view:
            if known.owner.instance_id == instance_id:
                return known.owner
        raise NotFound(f"there is no instance {instance_id!r}", param="instance_id")

    def _report_of(self, owner: Owner) -> LoadReport | None:
        known = self._view.get(owner)
        return None if known is None else known.report

    # ---- changes

    def _start(self, owner: Owner, change_id: str, body: ReconfigureBody | None) -> "asyncio.Task[ReconfigureReport]":
        change = Reconfiguration(self._context, owner, change_id, body)
        if body is None or not body.dry_run:
            # At once, not only when the task first runs: the next order must find it.
            self._running[owner.instance_id] = change
        task = asyncio.get_running_loop().create_task(change.run())
        self._tasks[task] = change
        task.add_done_callback(self._done)
        return task

    def _done(self, task: "asyncio.Task[ReconfigureReport]") -> None:
        change = self._tasks.pop(task)
        for name in [name for name, running in self._running.items() if running is change]:
            del self._running[name]
        if task.cancelled():
            return
        if task.exception() is not None:
            logger.error("%s: its end is a bug", change.change_id, exc_info=task.exception())
        elif task.result().outcome is not ReconfigureOutcome.PLANNED:
            self._ended.append(task.result())

    def _busy(self, owner: Owner, running: Reconfiguration) -> ReconfigureReport:
        return ReconfigureReport(
            instance_id=owner.instance_id,
            owner=owner,
            change_id="",
            phase="refused",
            outcome=ReconfigureOutcome.REFUSED,
            refusal=LayoutRefusal.BUSY,
            reason=f"{running.change_id} is under way",
        )

    def _new_id(self) -> str:
        self._count += 1
        return f"{self._id[:NAME_CHARS_MAX]}-{self._incarnation}-{self._count}"
