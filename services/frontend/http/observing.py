"""What an operator sees of HTTP: a span of each API call, below the client's own where it sent one, and counts."""

import asyncio
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshift.tracing import names, propagation
from meshift.tracing.histogram import DURATION_BOUNDS_S, Histogram
from meshift.tracing.spans import NO_TRACER, SpanKind, Tracer, child, error_status

TRACED_PREFIX = "/v1/"
"""Probes and scrapes would only be noise."""

UNMATCHED = "unmatched"
"""The route of paths that there are none for: their number must not be the clients' to choose."""

CLIENT_LEFT = 499
"""nginx' status for a client that didn't wait for the answer."""

TRACE_HEADERS = ("traceparent", "tracestate")


@dataclass(slots=True)
class HttpCounters:
    """Since the start."""

    requests: dict[tuple[str, int], int] = field(default_factory=dict)
    """By route and status."""
    durations: dict[str, Histogram] = field(default_factory=dict)
    """By route; from the request's head to the answer's end."""

    def answered(self, route: str, status: int, duration_s: float) -> None:
        """A request is over."""
        self.requests[route, status] = self.requests.get((route, status), 0) + 1
        durations = self.durations.get(route)
        if durations is None:
            durations = self.durations[route] = Histogram(DURATION_BOUNDS_S)
        durations.observe(duration_s)


class Observed:
    """The outermost layer."""

    def __init__(self, app: ASGIApp, *, tracer: Tracer, counters: HttpCounters) -> None:
        self._app = app
        self._tracer = tracer
        self._counters = counters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        watched = _WatchedSend(send)
        try:
            await self._pass_on(scope, receive, watched)
        finally:
            self._counters.answered(_route(scope), watched.status, loop.time() - begin_s)

    async def _pass_on(self, scope: Scope, receive: Receive, send: "_WatchedSend") -> None:
        if not scope["path"].startswith(TRACED_PREFIX):
            await self._app(scope, receive, send)
            return
        sent = Headers(scope=scope)
        with propagation.attach({name: sent[name] for name in TRACE_HEADERS if name in sent}):
            if self._tracer is NO_TRACER:
                await self._app(scope, receive, send)
            else:
                await self._trace(scope, receive, send)

    async def _trace(self, scope: Scope, receive: Receive, send: "_WatchedSend") -> None:
        method = scope["method"]
        with child(self._tracer, method, {names.HTTP_METHOD: method}, kind=SpanKind.SERVER) as span:
            try:
                await self._app(scope, receive, send)
            finally:
                route = _route(scope)
                span.update_name(f"{method} {route}" if route != UNMATCHED else method)
                span.set_attribute(names.HTTP_ROUTE, route)
                span.set_attribute(names.HTTP_STATUS, send.status)
                if send.status >= 500:
                    error_status(span, str(send.status))


class _WatchedSend:
    """Remembers the status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = CLIENT_LEFT

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)


def _route(scope: Scope) -> str:
    return str(getattr(scope.get("route"), "path", UNMATCHED))
