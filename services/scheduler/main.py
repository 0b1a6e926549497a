"""The scheduler process."""

import logging

from pydantic import Field

from meshift.schemas.errors import PeerTimeout
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
from meshift.services.scheduler.core import SchedulerCore, SchedulerOptions
from meshift.services.scheduler.metrics import SchedulerCollector

logger = logging.getLogger(__name__)


class SchedulerSettings(ServiceSettings, SchedulerOptions, MetricsSettings):
    """Settings of a scheduler."""

    scheduler_id: str = Field("scheduler", description="its name on the bus")


async def run(settings: SchedulerSettings) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code."""
    configure_logging(settings.log_level)
    stop = StopSignal()
    bus = connect_bus(settings, settings.scheduler_id)
    tracing = start_tracing("scheduler", settings.scheduler_id)
    core = SchedulerCore(
        settings.scheduler_id, new_incarnation(), bus, settings, tracer=tracing.tracer("meshift.scheduler")
    )
    exposition = Exposition(SchedulerCollector(core), BusCollector("scheduler", bus.counters))
    metrics = MetricsServer(exposition, settings)
    try:
        metrics.start()
        await stop.unless_stopped(core.start())
        if not stop.caught:
            say(f"scheduler {settings.scheduler_id} is ready")
        await stop.wait()
    except PeerTimeout as error:
        logger.error("scheduler %s can't join the bus: %s", settings.scheduler_id, error)
        return EXIT_UNAVAILABLE
    except OSError as error:
        logger.error("scheduler %s can't listen: %s", settings.scheduler_id, error)
        return EXIT_UNAVAILABLE
    finally:
        await core.stop()
        await metrics.stop()
        tracing.shutdown()
    return 0
