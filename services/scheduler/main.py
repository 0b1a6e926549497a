"""The scheduler process."""

from pydantic import Field

from meshift.services.bus.nats import NatsBus, NatsSettings
from meshift.services.process import ServiceSettings, StopSignal, configure_logging, new_incarnation, say
from meshift.services.scheduler.core import SchedulerCore, SchedulerOptions


class SchedulerSettings(ServiceSettings, SchedulerOptions):
    """Settings of a scheduler."""

    scheduler_id: str = Field("scheduler", description="its name on the bus")


async def run(settings: SchedulerSettings) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code."""
    configure_logging(settings.log_level)
    stop = StopSignal()
    bus = NatsBus(NatsSettings(url=settings.nats, connect_timeout_s=settings.connect_timeout_s))
    core = SchedulerCore(settings.scheduler_id, new_incarnation(), bus, settings)
    try:
        await stop.unless_stopped(core.start())
        if not stop.caught:
            say(f"scheduler {settings.scheduler_id} is ready")
        await stop.wait()
    finally:
        await core.stop()
    return 0
