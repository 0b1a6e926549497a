"""What every service process does alike: settings, logging, incarnation, signals. Real time only; not simulated."""

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from pydantic import BaseModel, Field

from meshift.services.bus.nats import NatsBus
from meshift.services.bus.nats_settings import NatsSettings
from meshift.tracing import propagation
from meshift.tracing.setup import Tracing, configure

ResultT = TypeVar("ResultT")

EXIT_FAILED = 70
"""The service died of an internal failure, or the engine did: start it again."""

EXIT_UNAVAILABLE = 69
"""Something it needs wasn't there by the deadline."""


EXIT_RESTART = 75
"""It ended well and wants to be started again: an operator asked for that."""


class ServiceSettings(BaseModel):
    """Settings of every service. Flags, or environment variables with the prefix MESHIFT_."""

    nats: str = Field("nats://127.0.0.1:4222", description="URL of the NATS server; several with commas")
    connect_timeout_s: float = Field(30.0, gt=0, description="time for the NATS server to be there")
    log_level: str = Field("info", description="debug, info, warning or error")


def new_incarnation() -> int:
    """A number that grows with every start of a service, on this machine and (with sane clocks) on all."""
    return time.time_ns() // 1_000_000


def configure_logging(level: str) -> None:
    """Log to stderr, one line a record."""
    logging.basicConfig(
        level=level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)-7s %(name)s: %(message)s",
    )


def say(line: str) -> None:
    """A line for whoever started the process."""
    print(line, flush=True)


def connect_bus(settings: ServiceSettings, client_name: str) -> NatsBus:
    """The service's bus client; it connects when it is started."""
    servers = tuple(url.strip() for url in settings.nats.split(","))
    nats = NatsSettings(servers=servers, client_name=client_name, connect_timeout_s=settings.connect_timeout_s)
    return NatsBus(nats, propagator=propagation)


def start_tracing(service: str, instance_id: str) -> Tracing:
    """From the environment; see `meshift.tracing.setup`. Not global: the service hands its tracers on."""
    return configure(f"meshift-{service}", instance_id=instance_id, set_global=False)


class StopSignal:
    """SIGTERM and SIGINT, caught while it is open."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._caught = asyncio.Event()
        self._actions: list[Callable[[], None]] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._catch)

    @property
    def caught(self) -> bool:
        return self._caught.is_set()

    def on_stop(self, action: Callable[[], None]) -> None:
        """Call `action` at each signal; at once if one has come already."""
        self._actions.append(action)
        if self.caught:
            action()

    async def wait(self) -> None:
        """Until a signal comes."""
        await self._caught.wait()

    async def unless_stopped(self, work: Coroutine[Any, Any, ResultT]) -> ResultT | None:
        """The result of `work`, or None if a signal came first: then it is cancelled."""
        task = self._loop.create_task(work)
        self.on_stop(task.cancel)  # type: ignore[arg-type]
        try:
            return await task
        except asyncio.CancelledError:
            if self.caught:
                return None
            raise
        finally:
            self._actions.pop()

    def _catch(self) -> None:
        self._caught.set()
        for action in list(self._actions):
            action()
