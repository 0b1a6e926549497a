"""What operators ask of a scheduler, through any frontend: its policy, and what it decided."""

import asyncio
from collections.abc import Callable

from meshift.schemas import subjects
from meshift.schemas.steering import DecisionsReply, DecisionsRequest, KeptPolicy, PolicyReply, PolicyRequest
from meshift.services.bus.base import Bus
from meshift.services.scheduler.decisions import DecisionLog
from meshift.services.scheduler.steering import Steering


class OperatorEndpoints:
    """Of one scheduler. `on_change` is called when other settings are in force."""

    def __init__(
        self,
        scheduler_id: str,
        incarnation: int,
        steering: Steering,
        decisions: DecisionLog,
        on_change: Callable[[], None],
    ) -> None:
        self._id = scheduler_id
        self._incarnation = incarnation
        self._steering = steering
        self._decisions = decisions
        self._on_change = on_change

    def serve(self, bus: Bus) -> None:
        """From the start of the bus on."""
        bus.serve("policy", subjects.POLICY, PolicyRequest, self._on_policy)
        bus.serve("decisions", subjects.DECISIONS, DecisionsRequest, self._on_decisions)
        bus.subscribe(subjects.POLICY_KEPT, KeptPolicy, self._on_kept)

    def _on_policy(self, request: PolicyRequest) -> PolicyReply:
        before = self._steering.stamp
        try:
            if request.kept is not None:
                self._steering.adopt(request.kept)
            if request.changes:
                self._steering.change(request.changes)
        finally:
            if self._steering.stamp != before:
                self._on_change()
        return PolicyReply(
            scheduler_id=self._id,
            incarnation=self._incarnation,
            stamp=self._steering.stamp,
            settings=self._steering.shown(),
            changes=self._steering.changes(),
        )

    def _on_kept(self, kept: KeptPolicy) -> None:
        if self._steering.adopt(kept):
            self._on_change()

    def _on_decisions(self, request: DecisionsRequest) -> DecisionsReply:
        log, now_s = self._decisions, asyncio.get_running_loop().time()
        return DecisionsReply(
            scheduler_id=self._id,
            incarnation=self._incarnation,
            decisions=log.newest(now_s, request.limit, request.subject, request.request_id),
            decided=log.decided,
            remembered=len(log),
            current=log.current(now_s, request.subject),
        )
