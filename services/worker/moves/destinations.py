"""Where a request goes that is to go anywhere: the scheduler says, or, without one, this worker itself."""

import asyncio
from collections.abc import Collection

from meshift.schemas import subjects
from meshift.schemas.errors import MeshError
from meshift.schemas.identity import Owner
from meshift.schemas.instances import DispatchReply, DispatchRequest, InstanceGone, LoadReport, ModelInfo
from meshift.services.bus.base import Bus, Subscription
from meshift.services.instances import InstanceView
from meshift.services.worker.options import WorkerOptions
from meshift.services.worker.requests import RequestRecord

HEARD_INTERVALS = 3
"""Report intervals in which every live instance is heard of."""

LISTEN_S = 10.0
"""How long a worker goes on listening to all reports after it last had to choose: usually it needs none of them."""


class MeshDestinations:
    """See `base.Destinations`."""

    def __init__(self, bus: Bus, owner: Owner, model: ModelInfo, options: WorkerOptions) -> None:
        self._bus = bus
        self._owner = owner
        self._model = model
        self._options = options
        self._view = InstanceView(HEARD_INTERVALS * options.report_interval_s)
        self._subscriptions: list[Subscription] = []
        self._since_s = 0.0
        self._silence: asyncio.TimerHandle | None = None

    async def choose(self, record: RequestRecord, excluded: Collection[Owner]) -> Owner | None:
        """See `base.Destinations`."""
        return await self._ask_scheduler(record, excluded) or await self._choose_alone(record, excluded)

    def stop(self) -> None:
        """Listen no more. Idempotent."""
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None
        for subscription in self._subscriptions:
            subscription.close()
        self._subscriptions.clear()

    async def _ask_scheduler(self, record: RequestRecord, excluded: Collection[Owner]) -> Owner | None:
        ask = DispatchRequest(
            request_id=record.key.request_id,
            attempt=record.key.attempt,
            frontend=record.frontend,
            model=self._model.name,
            demand=record.known_tokens,
            priority=record.priority,
            excluded=(self._owner, *sorted(excluded)),
        )
        try:
            reply = await self._bus.request(
                subjects.DISPATCH, ask, DispatchReply, timeout_s=self._options.move_timeout_s
            )
        except MeshError:
            return None
        return reply.owner if reply.owner not in (self._owner, *excluded) else None

    async def _choose_alone(self, record: RequestRecord, excluded: Collection[Owner]) -> Owner | None:
        """The instance with the most room for it; of those without enough, the one that misses least."""
        await self._hear_reports()
        self._view.expire(self._now_s())
        able = [
            known
            for known in self._view
            if known.takes_requests
            and known.report.model.name == self._model.name
            and known.owner != self._owner
            and known.owner not in excluded
        ]
        best = max(able, key=lambda known: _room(known.report), default=None)
        return None if best is None else best.owner

    async def _hear_reports(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._subscriptions:
            self._since_s = loop.time()
            self._subscriptions = [
                self._bus.subscribe(subjects.LOAD, LoadReport, self._on_report),
                self._bus.subscribe(subjects.INSTANCE_GONE, InstanceGone, self._on_gone),
            ]
        if self._silence is not None:
            self._silence.cancel()
        self._silence = loop.call_later(LISTEN_S, self.stop)
        heard_s = self._since_s + HEARD_INTERVALS * self._options.report_interval_s
        await asyncio.sleep(max(0.0, heard_s - loop.time()))

    def _on_report(self, report: LoadReport) -> None:
        self._view.on_report(report, self._now_s())

    def _on_gone(self, gone: InstanceGone) -> None:
        self._view.on_gone(gone.owner)

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()


def _room(report: LoadReport) -> int:
    """Tokens that it could give now, less what waits for them."""
    return report.free + report.cached - report.queued_demand
