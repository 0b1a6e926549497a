"""What all reconfigurations of one coordinator share."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from meshift.schemas import subjects
from meshift.schemas.identity import Owner
from meshift.schemas.instances import LoadReport
from meshift.schemas.reconfiguring import LayoutAsk, LayoutOrder, LayoutReply
from meshift.services.bus.base import Bus
from meshift.services.coordinator.counters import CoordinatorCounters
from meshift.services.coordinator.options import CoordinatorOptions
from meshift.tracing.spans import Tracer


@dataclass(slots=True)
class Context:
    """Of a coordinator on a bus."""

    bus: Bus
    options: CoordinatorOptions
    tracer: Tracer
    report_of: Callable[[Owner], LoadReport | None]
    """The newest of that incarnation, if it lives."""
    counters: CoordinatorCounters = field(default_factory=CoordinatorCounters)

    async def ask(self, owner: Owner, change_id: str | None) -> LayoutReply:
        """What there is. Raises what `Bus.request` raises."""
        ask = LayoutAsk(owner=owner, change_id=change_id)
        subject = subjects.worker_layout(owner.instance_id)
        return await self.bus.request(subject, ask, LayoutReply, timeout_s=self.options.ask_timeout_s)

    async def order(self, order: LayoutOrder) -> LayoutReply:
        """Let it be done. Raises likewise; asked again, it isn't done again."""
        subject = subjects.worker_layout_step(order.owner.instance_id)
        return await self.bus.request(subject, order, LayoutReply, timeout_s=self.options.ask_timeout_s)

    def now_s(self) -> float:
        """The loop's."""
        return asyncio.get_running_loop().time()
