"""The process of a service that lives on the bus alone: the scheduler, the coordinator."""

import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from opentelemetry.trace import Tracer
from prometheus_client.registry import Collector

from meshift.schemas.errors import PeerTimeout
from meshift.services.bus.base import Bus
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


class BusServiceSettings(ServiceSettings, MetricsSettings):
    """Settings of any of them."""


class Core(Protocol):
    """The service itself."""

    async def start(self) -> None:
        """Raises PeerTimeout."""

    async def stop(self) -> None:
        """Idempotent."""


CoreT = TypeVar("CoreT", bound=Core)


async def run_on_bus(
    service: str,
    name: str,
    settings: BusServiceSettings,
    make: Callable[[int, Bus, Tracer], CoreT],
    collector: Callable[[CoreT], Collector],
) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code. `make` gets incarnation, bus and tracer."""
    logger = logging.getLogger(f"meshift.services.{service}.main")
    configure_logging(settings.log_level)
    stop = StopSignal()
    bus = connect_bus(settings, name)
    tracing = start_tracing(service, name)
    core = make(new_incarnation(), bus, tracing.tracer(f"meshift.{service}"))
    metrics = MetricsServer(Exposition(collector(core), BusCollector(service, bus.counters)), settings)
    try:
        metrics.start()
        return await until_stopped(core.start(), stop, f"{service} {name}", logger)
    except OSError as error:
        logger.error("%s %s can't listen: %s", service, name, error)
        return EXIT_UNAVAILABLE
    finally:
        await core.stop()
        await metrics.stop()
        tracing.shutdown()


async def until_stopped(start: Coroutine[Any, Any, None], stop: StopSignal, who: str, logger: logging.Logger) -> int:
    """Start, say so, and wait for the signal. Returns the exit code."""
    try:
        await stop.unless_stopped(start)
        if not stop.caught:
            say(f"{who} is ready")
        await stop.wait()
    except PeerTimeout as error:
        logger.error("%s can't join the bus: %s", who, error)
        return EXIT_UNAVAILABLE
    return 0
