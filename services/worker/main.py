"""The worker process: one instance."""

import logging
from typing import Literal

from pydantic import Field

from meshift.backends.base import EngineStartError
from meshift.schemas.errors import PeerTimeout
from meshift.schemas.identity import Owner
from meshift.schemas.instances import InstanceState
from meshift.services.calibration.file import load_calibration
from meshift.services.calibration.reading import CalibrationFileError
from meshift.services.exposition import BusCollector, Exposition
from meshift.services.exposition.server import MetricsServer, MetricsSettings
from meshift.services.process import (
    EXIT_FAILED,
    EXIT_RESTART,
    EXIT_UNAVAILABLE,
    ServiceSettings,
    StopSignal,
    configure_logging,
    connect_bus,
    new_incarnation,
    say,
    start_tracing,
)
from meshift.services.worker.core import WorkerCore
from meshift.services.worker.engines import EngineSettings, build_engine
from meshift.services.worker.metrics import WorkerCollector
from meshift.services.worker.options import WorkerOptions

logger = logging.getLogger(__name__)


class WorkerSettings(ServiceSettings, WorkerOptions, EngineSettings, MetricsSettings):
    """Settings of a worker."""

    engine: Literal["sglang", "sim"] = Field("sglang", description="the real engine, or the timing model")


async def run(settings: WorkerSettings) -> int:
    """Serve until SIGTERM or SIGINT (then it drains), or until the engine dies. Returns the exit code."""
    configure_logging(settings.log_level)
    try:
        settings = calibrated(settings)
    except CalibrationFileError as error:
        logger.error("%s can't start: %s", settings.instance_id, error)
        return EXIT_FAILED
    stop = StopSignal()
    owner = Owner(instance_id=settings.instance_id, incarnation=new_incarnation())
    bus = connect_bus(settings, settings.instance_id)
    tracing = start_tracing("worker", settings.instance_id)
    engine = build_engine(settings.engine, settings)
    core = WorkerCore(owner, engine, bus, settings, tracer=tracing.tracer("meshift.worker"))
    metrics = MetricsServer(Exposition(WorkerCollector(core), BusCollector("worker", bus.counters)), settings)
    try:
        metrics.start()
        return await _serve(core, settings, stop)
    except EngineStartError as error:
        logger.error("the engine of %s did not start: %s", owner, error)
        return EXIT_FAILED
    except PeerTimeout as error:
        logger.error("%s can't join the bus: %s", owner, error)
        return EXIT_UNAVAILABLE
    except OSError as error:
        logger.error("%s can't show its metrics: %s", owner, error)
        return EXIT_UNAVAILABLE
    finally:
        await core.stop()
        await metrics.stop()
        tracing.shutdown()


def calibrated(settings: WorkerSettings) -> WorkerSettings:
    """With the priority classes that were measured, unless others are set. Raises CalibrationFileError."""
    if settings.calibration is None or "virtual_usage" in settings.model_fields_set:
        return settings
    measured = load_calibration(settings.calibration)
    name = settings.model_name or settings.model.name
    if measured.model != name:
        logger.warning("%s was measured with %s, and this is %s", settings.calibration, measured.model, name)
    return settings.model_copy(update={"virtual_usage": measured.virtual_usage})


async def _serve(core: WorkerCore, settings: WorkerSettings, stop: StopSignal) -> int:
    await stop.unless_stopped(core.start())
    if stop.caught:
        return 0
    say(f"worker {core.owner} is ready")
    stop.on_stop(lambda: say(f"worker {core.owner} drains: {core.drain(settings.drain_deadline_s)} requests left"))
    state = await core.ended
    if state is InstanceState.FAILED:
        return EXIT_FAILED
    return EXIT_RESTART if core.restart_wanted and not stop.caught else 0
