"""Spans and counts of HTTP requests."""

from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from opentelemetry.trace import SpanKind, StatusCode, get_current_span

from meshift.services.frontend.http import HttpSettings, create_app
from meshift.services.frontend.http.app import RenderMetrics
from meshift.services.frontend.http.observing import CLIENT_LEFT, UNMATCHED, HttpCounters, Observed
from meshift.services.frontend.text.registry import TokenizerRegistry
from meshift.tracing import names
from meshift.tracing.spans import NO_TRACER
from tests.support.traces import Recorder, context_of
from tests.unit.frontend.fake_frontend import FakeFrontend, model_info
from tests.unit.frontend.http.harness import OPEN

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
TRACEPARENT = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}


class Kit:
    """An application that is observed."""

    def __init__(self, metrics: RenderMetrics | None = None) -> None:
        self.recorder = Recorder()
        self.counters = HttpCounters()
        self.frontend = FakeFrontend([model_info(path="nowhere")])
        self.app: FastAPI = create_app(
            self.frontend,
            TokenizerRegistry(),
            HttpSettings(),
            access=OPEN,
            tracer=self.recorder.tracer,
            counters=self.counters,
            metrics=metrics,
        )

    async def get(self, path: str, **headers: str) -> httpx.Response:
        transport = httpx.ASGITransport(app=self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shell") as client:
            return await client.get(path, headers=headers)


async def test_a_call_has_a_span_named_by_its_route() -> None:
    kit = Kit()
    await kit.get("/v1/models/tiny")
    (root,) = kit.recorder.trees()
    assert root.name == "GET /v1/models/{name:path}"
    assert root.span.kind is SpanKind.SERVER
    assert root.attribute(names.HTTP_STATUS) == 200
    assert root.span.status.status_code is StatusCode.UNSET


async def test_it_is_below_the_clients_span() -> None:
    kit = Kit()
    await kit.get("/v1/models", **TRACEPARENT)
    (root,) = kit.recorder.trees()
    assert root.span.parent is not None
    assert format(root.span.parent.trace_id, "032x") == TRACE_ID
    assert format(root.span.parent.span_id, "016x") == PARENT_ID
    assert format(context_of(root.span).trace_id, "032x") == TRACE_ID


@pytest.mark.parametrize("header", ["", "nonsense", f"00-{'0' * 32}-{PARENT_ID}-01"])
async def test_a_malformed_header_counts_as_none(header: str) -> None:
    kit = Kit()
    assert (await kit.get("/v1/models", traceparent=header)).status_code == 200
    (root,) = kit.recorder.trees()
    assert root.span.parent is None


async def test_probes_and_scrapes_have_no_span() -> None:
    kit = Kit(metrics=lambda accept: (b"x 1\n", "text/plain"))
    for path in ("/health", "/ready", "/metrics"):
        assert (await kit.get(path)).status_code == 200
    assert kit.recorder.trees() == []
    assert {route for route, _ in kit.counters.requests} == {"/health", "/ready", "/metrics"}


async def test_an_error_is_marked_and_counted() -> None:
    kit = Kit()
    kit.frontend.models = lambda: 1 / 0  # type: ignore[assignment,method-assign,return-value]
    assert (await kit.get("/v1/models")).status_code == 500
    (root,) = kit.recorder.trees()
    assert root.attribute(names.ERROR_TYPE) == "500"
    assert root.span.status.status_code is StatusCode.ERROR
    assert kit.counters.requests == {("/v1/models", 500): 1}


async def test_paths_without_a_route_share_one_series() -> None:
    kit = Kit()
    for number in range(5):
        assert (await kit.get(f"/v1/nothing/{number}")).status_code == 404
    assert kit.counters.requests == {(UNMATCHED, 404): 5}
    assert {tree.name for tree in kit.recorder.trees()} == {"GET"}


async def test_metrics_follow_the_accept_header() -> None:
    kit = Kit(metrics=lambda accept: (accept.encode(), "text/special"))
    response = await kit.get("/metrics", accept="this")
    assert (response.text, response.headers["content-type"]) == ("this", "text/special")
    assert (await Kit().get("/metrics")).status_code == 404


async def test_a_client_that_left_has_a_status_of_its_own() -> None:
    counters = HttpCounters()

    async def silent(scope: Any, receive: Any, send: Any) -> None:
        """As `Boundary` does with one that is gone."""

    await Observed(silent, tracer=NO_TRACER, counters=counters)({"type": "http", "path": "/"}, None, None)  # type: ignore[arg-type]
    assert counters.requests == {(UNMATCHED, CLIENT_LEFT): 1}


async def test_without_tracing_a_clients_trace_is_passed_on() -> None:
    seen: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(get_current_span().get_span_context().trace_id)

    headers = [(name.encode(), value.encode()) for name, value in TRACEPARENT.items()]
    scope = {"type": "http", "method": "GET", "path": "/v1/x", "headers": headers}
    await Observed(app, tracer=NO_TRACER, counters=HttpCounters())(scope, None, None)  # type: ignore[arg-type]
    assert seen == [int(TRACE_ID, 16)]
