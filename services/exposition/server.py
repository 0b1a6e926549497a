"""A tiny HTTP server for the metrics of services that have no HTTP of their own. It runs on the service's loop: what
collectors read needs no lock."""

import asyncio
import socket
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field

from meshift.services.exposition.registry import Exposition

if TYPE_CHECKING:
    from meshift.services.exposition.listener import Listener


class MetricsSettings(BaseModel):
    """Where a service shows its metrics."""

    metrics_host: str = Field("127.0.0.1", description="address of the metrics")
    metrics_port: int = Field(0, ge=0, le=65535, description="port of the metrics for Prometheus; 0 for none")


class MetricsServer:
    """Answers every path with the metrics. Does nothing where the settings name no port."""

    def __init__(self, exposition: Exposition, settings: MetricsSettings) -> None:
        self._exposition = exposition
        self._settings = settings
        self._listener: Listener | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Listen. Raises OSError if the address can't be had."""
        host, port = self._settings.metrics_host, self._settings.metrics_port
        if port:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            opened = socket.create_server((host, port), family=family)
            from meshift.services.exposition.listener import Listener

            self._listener = Listener(self._exposition.registry)
            self._task = asyncio.get_running_loop().create_task(self._listener.serve(sockets=[opened]))

    async def stop(self) -> None:
        """Idempotent."""
        if self._listener is not None:
            self._listener.should_exit = True
        task, self._task = self._task, None
        if task is not None:
            await task
