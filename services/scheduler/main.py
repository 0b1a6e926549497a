"""The scheduler process."""

from pydantic import Field

from meshift.services.bus_process import BusServiceSettings, run_on_bus
from meshift.services.scheduler.core import SchedulerCore, SchedulerOptions
from meshift.services.scheduler.metrics import SchedulerCollector


class SchedulerSettings(BusServiceSettings, SchedulerOptions):
    """Settings of a scheduler."""

    scheduler_id: str = Field("scheduler", description="its name on the bus")


async def run(settings: SchedulerSettings) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code."""
    name = settings.scheduler_id
    return await run_on_bus(
        "scheduler",
        name,
        settings,
        lambda incarnation, bus, tracer: SchedulerCore(name, incarnation, bus, settings, tracer=tracer),
        SchedulerCollector,
    )
