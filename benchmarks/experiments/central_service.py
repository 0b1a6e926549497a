"""The centralized scheduler as a process on the bus, to compare with: `python -m ... URL INSTANCES PAGES`. Every
instance asks it at every step what the next one does."""

import asyncio
import sys
from typing import Literal

from meshift.schemas.base import Message
from meshift.schemas.identity import Owner
from meshift.schemas.instances import DispatchReply, DispatchRequest
from meshift.schemas.subjects import PREFIX
from meshift.services.bus.base import ServiceInfo
from meshift.services.bus.nats import NatsBus
from meshift.services.bus.nats_settings import NatsSettings
from meshift.services.process import StopSignal, say
from meshift.services.scheduler.policy.central import CentralScheduler

STEP = f"{PREFIX}.central.step"
PAGE_TOKENS = 16
READY = "central scheduler is ready"


class StepRequest(Message):
    """Instance -> scheduler: a step has ended."""

    kind: Literal["central_step_request"] = "central_step_request"
    owner: Owner
    tokens: tuple[int, ...]
    """The one that each request of the batch got."""
    finished: tuple[str, ...]


class StepReply(Message):
    """Scheduler -> instance: what the next step does."""

    kind: Literal["central_step_reply"] = "central_step_reply"
    admitted: tuple[str, ...]
    preempted: tuple[str, ...]
    running: int


def owner_of(index: int) -> Owner:
    """The instances' names."""
    return Owner(f"i{index:04}", 1)


async def serve(url: str, instances: int, pages: int) -> None:
    """Until SIGTERM."""
    stop = StopSignal()
    central = CentralScheduler([owner_of(index) for index in range(instances)], pages, PAGE_TOKENS)
    bus = NatsBus(NatsSettings(servers=(url,), client_name="central"))

    def dispatch(request: DispatchRequest) -> DispatchReply:
        owner = central.dispatch(request.request_id, request.demand)
        return DispatchReply(owner=owner, scheduler_id="central", incarnation=1)

    def step(request: StepRequest) -> StepReply:
        told = central.on_step(request.owner, request.finished)
        return StepReply(admitted=told.admitted, preempted=told.preempted, running=told.running)

    bus.serve("dispatch", f"{PREFIX}.central.dispatch", DispatchRequest, dispatch)
    bus.serve("step", STEP, StepRequest, step)
    await bus.start(ServiceInfo("central", "central"))
    say(READY)
    await stop.wait()
    await bus.close()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
