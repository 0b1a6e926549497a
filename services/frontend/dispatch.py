"""Where a request goes: the scheduler says, or, when it doesn't answer, this frontend itself (bypass mode)."""

import asyncio
import logging
from collections.abc import Sequence

from meshift.schemas import subjects
from meshift.schemas.errors import NotFound, OverloadError, PeerError, Unavailable
from meshift.schemas.identity import FrontendRef, Owner
from meshift.schemas.instances import DispatchReply, DispatchRequest, SchedulerReport
from meshift.services.bus.base import Bus
from meshift.services.frontend.counters import FrontendCounters
from meshift.services.frontend.streams import Stream, StreamState
from meshift.services.instances import InstanceView
from meshift.tracing import names

logger = logging.getLogger(__name__)

ASK_AGAIN_S_MIN = 0.05
"""Shortest pause before a scheduler that has room nowhere is asked again, whatever it says."""


class Dispatcher:
    """Chooses owners. Bypass mode begins with a dispatch that isn't answered and ends with a scheduler's report."""

    def __init__(
        self, bus: Bus, frontend: FrontendRef, view: InstanceView, timeout_s: float, counters: FrontendCounters
    ) -> None:
        self._bus = bus
        self._frontend = frontend
        self._view = view
        self._timeout_s = timeout_s
        self._counters = counters
        self._turn = 0
        self.scheduler_alive = True

    def on_scheduler(self, report: SchedulerReport) -> None:
        """A scheduler lives."""
        if not self.scheduler_alive:
            logger.info("scheduler %s#%d answers", report.scheduler_id, report.incarnation)
        self.scheduler_alive = True

    async def choose(self, stream: Stream, excluded: Sequence[Owner]) -> Owner | None:
        """An owner for the stream's next attempt; None if the stream ended while it waited for room. Raises NotFound
        (nobody serves the model), Unavailable."""
        with stream.trace.step(names.DISPATCH) as span:
            since_s = self._now_s()
            while self.scheduler_alive and stream.state is StreamState.SUBMITTING:
                reply = await self._ask_scheduler(stream, excluded, self._now_s() - since_s)
                if reply is None:
                    break
                if reply.owner is not None:
                    self._counters.placed_by_scheduler += 1
                    span.set_attribute(names.OWNER, str(reply.owner))
                    span.set_attribute(names.DISPATCH_REASON, reply.reason)
                    return reply.owner
                await asyncio.sleep(max(reply.ask_again_s, ASK_AGAIN_S_MIN))
            if stream.state is not StreamState.SUBMITTING:
                return None
            span.set_attribute(names.DISPATCH_BYPASS, True)
            owner = self._bypass(stream.request.model, excluded)
            self._counters.placed_in_bypass += 1
            span.set_attribute(names.OWNER, str(owner))
            return owner

    async def _ask_scheduler(self, stream: Stream, excluded: Sequence[Owner], waited_s: float) -> DispatchReply | None:
        request = stream.request
        ask = DispatchRequest(
            request_id=request.request_id,
            attempt=stream.attempt + 1,
            frontend=self._frontend,
            model=request.model,
            demand=len(request.prompt) + len(stream.output),
            priority=request.priority,
            excluded=tuple(excluded),
            may_wait=True,
            waited_s=waited_s,
        )
        try:
            return await self._bus.request(subjects.DISPATCH, ask, DispatchReply, timeout_s=self._timeout_s)
        except PeerError as error:
            if self.scheduler_alive:
                logger.warning("scheduler lost, dispatching without it: %s", error)
            self.scheduler_alive = False
        except (NotFound, OverloadError):
            # A scheduler that has just started doesn't know the instances yet; this frontend may.
            pass
        return None

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()

    def _bypass(self, model: str, excluded: Sequence[Owner]) -> Owner:
        served = sorted({known.report.model.name for known in self._view})
        if served and model not in served:
            raise NotFound(f"model {model!r} is not served; there is {', '.join(served)}", param="model")
        able = [
            known.owner
            for known in self._view
            if known.takes_requests and known.report.model.name == model and known.owner not in excluded
        ]
        if not able:
            raise Unavailable(f"no instance of {model!r} takes requests now")
        self._turn += 1
        return able[self._turn % len(able)]
