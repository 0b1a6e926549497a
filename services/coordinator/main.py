"""The coordinator process."""

from pydantic import Field

from meshift.services.bus_process import BusServiceSettings, run_on_bus
from meshift.services.coordinator.core import CoordinatorCore
from meshift.services.coordinator.metrics import CoordinatorCollector
from meshift.services.coordinator.options import CoordinatorOptions


class CoordinatorSettings(BusServiceSettings, CoordinatorOptions):
    """Settings of a coordinator."""

    coordinator_id: str = Field("coordinator", description="its name on the bus")


async def run(settings: CoordinatorSettings) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code."""
    name = settings.coordinator_id
    return await run_on_bus(
        "coordinator",
        name,
        settings,
        lambda incarnation, bus, tracer: CoordinatorCore(name, incarnation, bus, settings, tracer=tracer),
        CoordinatorCollector,
    )
