"""The scheduler process."""

import logging

from pydantic import Field

from meshift.services.bus_process import BusServiceSettings, run_on_bus
from meshift.services.calibration.growth import load_growth, with_growth
from meshift.services.calibration.reading import CalibrationFileError, CalibrationPath
from meshift.services.process import EXIT_FAILED, configure_logging
from meshift.services.scheduler.core import SchedulerCore, SchedulerOptions
from meshift.services.scheduler.metrics import SchedulerCollector

logger = logging.getLogger(__name__)


class SchedulerSettings(BusServiceSettings, SchedulerOptions):
    """Settings of a scheduler."""

    scheduler_id: str = Field("scheduler", description="its name on the bus")
    calibration: CalibrationPath = Field(
        None, description="file of `meshift calibrate`: how steps grow with load, for the bound on what priorities cost"
    )


async def run(settings: SchedulerSettings) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code."""
    configure_logging(settings.log_level)
    name = settings.scheduler_id
    try:
        options = calibrated(settings)
    except CalibrationFileError as error:
        logger.error("%s can't start: %s", name, error)
        return EXIT_FAILED
    return await run_on_bus(
        "scheduler",
        name,
        options,
        lambda incarnation, bus, tracer: SchedulerCore(name, incarnation, bus, options, tracer=tracer),
        SchedulerCollector,
    )


def calibrated(settings: SchedulerSettings) -> SchedulerSettings:
    """With what was measured, where nothing else is set. Raises CalibrationFileError."""
    if settings.calibration is None:
        return settings
    growth = load_growth(settings.calibration)
    if growth is None:
        logger.warning("%s doesn't say how steps grow with load: calibrate again", settings.calibration)
    return settings.model_copy(update={"scheduling": with_growth(settings.scheduling, growth)})
