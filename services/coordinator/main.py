"""The coordinator process."""

import logging

from pydantic import Field

from meshift.schemas.errors import PeerTimeout
from meshift.services.coordinator.core import CoordinatorCore
from meshift.services.coordinator.metrics import CoordinatorCollector
from meshift.services.coordinator.options import CoordinatorOptions
from meshift.services.exposition import BusCollector, Exposition
from meshift.services.exposition.server import MetricsServer, MetricsSettings
from meshift.services.process import (
    EXIT_UNAVAILABLE,
    ServiceSettings,
    StopSignal,
    configure_logging,
    connect_bus,
    new_incarnation,
    say,
    start_tracing,
)

logger = logging.getLogger(__name__)


class CoordinatorSettings(ServiceSettings, CoordinatorOptions, MetricsSettings):
    """Settings of a coordinator."""

    coordinator_id: str = Field("coordinator", description="its name on the bus")


async def run(settings: CoordinatorSettings) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code."""
    configure_logging(settings.log_level)
    stop = StopSignal()
    bus = connect_bus(settings, settings.coordinator_id)
    tracing = start_tracing("coordinator", settings.coordinator_id)
    core = CoordinatorCore(
        settings.coordinator_id, new_incarnation(), bus, settings, tracer=tracing.tracer("meshift.coordinator")
    )
    exposition = Exposition(CoordinatorCollector(core), BusCollector("coordinator", bus.counters))
    metrics = MetricsServer(exposition, settings)
    try:
        metrics.start()
        await stop.unless_stopped(core.start())
        if not stop.caught:
            say(f"coordinator {settings.coordinator_id} is ready")
        await stop.wait()
    except PeerTimeout as error:
        logger.error("coordinator %s can't join the bus: %s", settings.coordinator_id, error)
        return EXIT_UNAVAILABLE
    except OSError as error:
        logger.error("coordinator %s can't listen: %s", settings.coordinator_id, error)
        return EXIT_UNAVAILABLE
    finally:
        await core.stop()
        await metrics.stop()
        tracing.shutdown()
    return 0
