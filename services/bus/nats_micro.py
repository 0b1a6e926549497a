"""Registration as a NATS micro service: what `nats micro ls`, `ping`, `info` and `stats` show."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from nats.aio.client import Client
from nats.micro.request import Request
from nats.micro.service import EndpointStats as MicroStats
from nats.micro.service import Service, ServiceConfig

import meshift
from meshift.services.bus.base import ServiceInfo
from meshift.services.bus.receiver import Endpoint

NANOSECONDS = 1_000_000_000

OnRequest = Callable[[Endpoint[Any], Request], Awaitable[None]]


class MicroService(Service):
    """`nats.micro.Service` with endpoints that can be taken away one by one, and with statistics of handlers that go
    on after the library's callback has returned."""

    def __init__(self, client: Client, service: ServiceInfo, on_request: OnRequest) -> None:
        self._on_request = on_request
        self._handlers: dict[str, Endpoint[Any]] = {}
        metadata: Mapping[str, str] = {**service.metadata, "instance": service.instance}
        config = ServiceConfig(
            name=service.name,
            version=meshift.__version__,
            description=service.description,
            metadata=dict(metadata),
            stats_handler=self._complete_stats,
        )
        super().__init__(client, config)

    async def add(self, endpoint: Endpoint[Any]) -> None:
        """Take requests for `endpoint`, sharing them with all that serve its subject. Idempotent."""
        if self._handlers.get(endpoint.subject) is endpoint:
            return

        async def on_request(request: Request) -> None:
            await self._on_request(endpoint, request)

        self._handlers[endpoint.subject] = endpoint
        await self.add_endpoint(name=endpoint.name, subject=endpoint.subject, handler=on_request)

    async def remove(self, endpoint: Endpoint[Any]) -> None:
        """Take no more requests for `endpoint`."""
        if self._handlers.get(endpoint.subject) is not endpoint:
            return
        del self._handlers[endpoint.subject]
        for registered in list(self._endpoints):
            if registered._subject == endpoint.subject:
                self._endpoints.remove(registered)
                await registered._stop()

    def _complete_stats(self, stats: MicroStats) -> dict[str, int]:
        # The library saw only how long it took to start the handler.
        endpoint = self._handlers[stats.subject]
        own = endpoint.stats
        stats.num_errors = own.errors
        stats.last_error = own.last_error
        stats.processing_time = round(own.processing_s * NANOSECONDS)
        stats.average_processing_time = stats.processing_time // max(1, own.finished)
        return {"running": endpoint.running, "overloaded": own.overloaded}
