"""Registration as a NATS micro service: what `nats micro ls`, `ping`, `info` and `stats` show."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import meshift
from meshift.services.bus.base import ServiceInfo
from meshift.services.bus.nats_client import BusClient, Inlet
from meshift.services.bus.nats_library import EndpointConfig, MicroEndpoint, MicroStats, ServiceConfig
from meshift.services.bus.nats_library import MicroService as Service
from meshift.services.bus.receiver import Endpoint

NANOSECONDS = 1_000_000_000


class Request(NamedTuple):
    """A request as it came: where the answer goes (empty: nowhere), and the rest undecoded."""

    reply: str
    payload: bytes
    headers: bytes | None


OnRequest = Callable[[Endpoint[Any], Request], None]
MakeInlet = Callable[[Callable[[bytes, bytes, bytes, bytes | None], None], str], Inlet]
"""Of a receiver and the subject that it is for."""


class MicroService(Service):
    """`nats.micro.Service` with endpoints that can be taken away one by one, and with statistics of handlers that go
    on after the library's callback has returned."""

    def __init__(self, client: BusClient, service: ServiceInfo, make_inlet: MakeInlet, on_request: OnRequest) -> None:
        self._bus_client = client
        self._make_inlet = make_inlet
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
        self._handlers[endpoint.subject] = endpoint
        registered = MicroEndpoint(self, EndpointConfig(name=endpoint.name, subject=endpoint.subject, handler=_unused))
        inlet = self._make_inlet(partial(self._take, endpoint, registered), endpoint.subject)
        registered._subscription = await self._bus_client.subscribe_to(
            endpoint.subject, inlet.put, registered._queue_group
        )
        self._endpoints.append(registered)

    def _take(
        self,
        endpoint: Endpoint[Any],
        registered: MicroEndpoint,
        subject: bytes,
        reply: bytes,
        payload: bytes,
        headers: bytes | None,
    ) -> None:
        registered._num_requests += 1
        self._on_request(endpoint, Request(reply.decode(), payload, headers))

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


async def _unused(_: object) -> None:
    raise AssertionError("requests don't take nats-py's way here")
