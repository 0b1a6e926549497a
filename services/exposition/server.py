"""A tiny HTTP server for the metrics of services that have no HTTP of their own. It runs on the service's loop: what
collectors read needs no lock."""

import asyncio
import contextlib
import socket
from collections.abc import Generator

import uvicorn
from prometheus_client import make_asgi_app
from pydantic import BaseModel, Field

from meshift.services.exposition.registry import Exposition

STOP_GRACE_S = 2
CONNECTIONS_MAX = 32


class MetricsSettings(BaseModel):
    """Where a service shows its metrics."""

    metrics_host: str = Field("127.0.0.1", description="address of the metrics")
    metrics_port: int = Field(0, ge=0, le=65535, description="port of the metrics for Prometheus; 0 for none")


class _Server(uvicorn.Server):
    """Leaves the process' signals alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class MetricsServer:
    """Answers every path with the metrics. Does nothing where the settings name no port."""

    def __init__(self, exposition: Exposition, settings: MetricsSettings) -> None:
        config = uvicorn.Config(
            make_asgi_app(exposition.registry),
            lifespan="off",
            loop="none",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=CONNECTIONS_MAX,
            timeout_graceful_shutdown=STOP_GRACE_S,
        )
        self._server = _Server(config)
        self._settings = settings
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Listen. Raises OSError if the address can't be had."""
        host, port = self._settings.metrics_host, self._settings.metrics_port
        if port:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, port), family=family)
            self._task = asyncio.get_running_loop().create_task(self._server.serve(sockets=[listener]))

    async def stop(self) -> None:
        """Idempotent."""
        self._server.should_exit = True
        task, self._task = self._task, None
        if task is not None:
            await task
