"""The command as a client of the bus."""

import contextlib
import logging
import os
from collections.abc import AsyncIterator, Iterator

from meshift.schemas.errors import PeerTimeout
from meshift.services.bus.base import Bus, ServiceInfo
from meshift.services.cli.errors import CommandError
from meshift.services.process import ServiceSettings, connect_bus

CONNECT_TIMEOUT_S = 2.0


@contextlib.asynccontextmanager
async def joined_bus(nats_url: str) -> AsyncIterator[Bus]:
    """A bus connection for one command. Raises `CommandError` if no NATS server answers."""
    name = f"command-{os.getpid()}"
    bus: Bus = connect_bus(ServiceSettings(nats=nats_url, connect_timeout_s=CONNECT_TIMEOUT_S), name)
    try:
        with errors_only():
            await bus.start(ServiceInfo("command", name))
    except PeerTimeout as error:
        raise CommandError(f"no mesh answers at {nats_url}; `meshift up` starts one") from error
    try:
        yield bus
    finally:
        await bus.close()


@contextlib.contextmanager
def errors_only() -> Iterator[None]:
    """Keep the bus's warnings back: that a server refuses is told by the error in the end, once."""
    logger = logging.getLogger("meshift.bus")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
