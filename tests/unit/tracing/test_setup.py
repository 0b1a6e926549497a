"""Tracing set up from the environment, with the real SDK."""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode

from meshift.tracing.json_lines import JsonLinesExporter
from meshift.tracing.setup import Tracing, TracingSettings, configure

HTTP_MODULE = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
GRPC_MODULE = "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("OTEL_") or name == "MESHIFT_TRACE_FILE":
            monkeypatch.delenv(name)


@pytest.fixture
def global_provider(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is made the global provider; the process's own stays untouched."""
    providers: list[Any] = []
    monkeypatch.setattr(trace, "set_tracer_provider", providers.append)
    return providers


def read_spans(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- settings ----


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, TracingSettings()),
        ({"MESHIFT_TRACE_FILE": "", "OTEL_EXPORTER_OTLP_ENDPOINT": ""}, TracingSettings()),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, TracingSettings(otlp=True)),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, TracingSettings(otlp=True)),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, TracingSettings(otlp=True)),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"}, TracingSettings()),
        ({"MESHIFT_TRACE_FILE": "/x/y.jsonl"}, TracingSettings(trace_file=Path("/x/y.jsonl"))),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            TracingSettings(otlp=True, otlp_protocol="grpc"),
        ),
        (
            {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            TracingSettings(otlp_protocol="http/protobuf"),
        ),
        (
            {"OTEL_SDK_DISABLED": "True", "MESHIFT_TRACE_FILE": "/x", "OTEL_TRACES_EXPORTER": "otlp"},
            TracingSettings(),
        ),
    ],
)
def test_settings(environment: Mapping[str, str], expected: TracingSettings) -> None:
    assert TracingSettings.from_environment(environment) == expected


# ---- nothing set ----


def test_nothing_set_sets_nothing(global_provider: list[Any]) -> None:
    threads = threading.active_count()
    tracing = configure("worker")
    assert not tracing.enabled
    assert global_provider == []
    assert threading.active_count() == threads
    with tracing.tracer("test").start_as_current_span("nothing") as span:
        assert not span.is_recording()
        assert not trace.get_current_span().get_span_context().is_valid
    assert tracing.shutdown()


def test_nothing_set_costs_next_to_nothing() -> None:
    tracer = configure("worker", set_global=False).tracer("test")
    rounds = 2000
    begun = time.perf_counter()
    for _ in range(rounds):
        tracer.start_span("nothing").end()
    assert (time.perf_counter() - begun) / rounds < 100e-6


def run_python(code: str, **environment: str) -> str:
    """A process of its own, for what only its start or end shows."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(sys.path), "PATH": "", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout + done.stderr


def test_nothing_set_loads_no_sdk() -> None:
    code = (
        "import sys\n"
        "from meshift.tracing import setup, propagation, names\n"
        "assert not setup.configure('worker').enabled\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry.sdk')])\n"
    )
    assert run_python(code).strip() == "[]"


# ---- a file ----


def test_file_holds_each_span_as_a_line(tmp_path: Path, global_provider: list[Any]) -> None:
    path = tmp_path / "new folder" / "spans.jsonl"
    tracing = configure("worker", TracingSettings(trace_file=path), instance_id="w1")
    assert tracing.enabled
    assert [type(provider) for provider in global_provider] == [TracerProvider]
    tracer = tracing.tracer("meshift.test")
    attributes: dict[str, str | int] = {"gen_ai.request.model": "llama", "n": 3}
    with (
        tracer.start_as_current_span("chat llama", kind=SpanKind.SERVER, attributes=attributes) as parent,
        tracer.start_as_current_span("meshift.dispatch") as child,
    ):
        child.add_event("meshift.first_token", {"index": 0})
        child.set_status(Status(StatusCode.ERROR, "no instance\nat all"))
    assert tracing.shutdown()

    second, first = read_spans(path)
    assert (first["name"], first["kind"], first["parent_id"]) == ("chat llama", "SpanKind.SERVER", None)
    assert first["attributes"] == {"gen_ai.request.model": "llama", "n": 3}
    assert first["context"]["trace_id"] == f"0x{parent.get_span_context().trace_id:032x}"
    assert second["name"] == "meshift.dispatch"
    assert second["parent_id"] == first["context"]["span_id"]
    assert second["context"]["trace_id"] == first["context"]["trace_id"]
    assert second["status"] == {"status_code": "ERROR", "description": "no instance\nat all"}
    assert [(event["name"], event["attributes"]) for event in second["events"]] == [
        ("meshift.first_token", {"index": 0})
    ]
    resource = first["resource"]["attributes"]
    assert resource["service.name"] == "worker"
    assert resource["service.namespace"] == "meshift"
    assert resource["service.instance.id"] == "w1"
    assert first["start_time"] <= second["start_time"] <= second["end_time"] <= first["end_time"]


def test_files_are_appended_to_by_many(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    path.write_text('{"name": "before"}\n')
    tracings = [configure(f"w{i}", TracingSettings(trace_file=path), set_global=False) for i in range(3)]
    for i, tracing in enumerate(tracings):
        for j in range(20):
            tracing.tracer("t").start_span(f"{i}.{j}").end()
    assert all(tracing.shutdown() for tracing in tracings)
    names = [span["name"] for span in read_spans(path)]
    assert names[0] == "before"
    assert sorted(names[1:]) == sorted(f"{i}.{j}" for i in range(3) for j in range(20))


@pytest.mark.parametrize(("path", "reason"), [(".", "Is a directory"), ("file/below", "File exists")])
def test_file_that_can_not_be_opened_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, path: str, reason: str
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.ERROR):
        tracing = configure("worker", TracingSettings(trace_file=tmp_path / path), set_global=False)
    assert not tracing.enabled
    (record,) = caplog.records
    assert record.exc_info is None
    assert record.message == f"no spans are written to MESHIFT_TRACE_FILE={tmp_path / path}: {reason}"


def test_file_that_can_not_be_written_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    provider = TracerProvider()
    with provider.get_tracer("t").start_as_current_span("lost") as span:
        pass
    assert isinstance(span, ReadableSpan)
    exporter = JsonLinesExporter(full)
    with caplog.at_level(logging.ERROR):
        assert exporter.export([span]) is SpanExportResult.FAILURE
    assert "1 spans are lost: can't write to /dev/full" in caplog.text
    exporter.shutdown()
    exporter.shutdown()
    assert exporter.export([span]) is SpanExportResult.FAILURE


def test_process_end_flushes(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    code = (
        "from opentelemetry import trace\n"
        "from meshift.tracing.setup import configure\n"
        "configure('worker')\n"
        "trace.get_tracer('t').start_span('last words').end()\n"
    )
    run_python(code, MESHIFT_TRACE_FILE=str(path))
    assert [span["name"] for span in read_spans(path)] == ["last words"]


@pytest.mark.parametrize(("sampler", "kept"), [("always_on", 1), ("always_off", 0), ("traceidratio", 0)])
def test_sampler_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampler: str, kept: int) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.0")
    path = tmp_path / "spans.jsonl"
    tracing = configure("worker", TracingSettings(trace_file=path), set_global=False)
    tracing.tracer("t").start_span("maybe").end()
    assert tracing.shutdown()
    assert len(read_spans(path)) == kept


# ---- shutdown ----


class StuckExporter(SpanExporter):
    """Exports when it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.go.wait(20)
        return SpanExportResult.SUCCESS


def fake_otlp(monkeypatch: pytest.MonkeyPatch, exporter: SpanExporter, module: str = HTTP_MODULE) -> None:
    """As if the exporter package were installed."""
    fake = ModuleType(module)
    fake.OTLPSpanExporter = lambda: exporter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module, fake)


def test_shutdown_keeps_its_deadline(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    exporter = StuckExporter()
    fake_otlp(monkeypatch, exporter)
    tracing = configure("worker", TracingSettings(otlp=True), set_global=False)
    tracing.tracer("t").start_span("stuck").end()
    begun = time.monotonic()
    with caplog.at_level(logging.WARNING):
        assert not tracing.shutdown(timeout_s=0.05)
    assert time.monotonic() - begun < 5
    assert "spans were not sent within 0.05 s" in caplog.text
    exporter.go.set()
    assert tracing.shutdown()
    assert not tracing.enabled


# ---- OTLP ----


@pytest.mark.parametrize(("protocol", "module"), [("http/protobuf", HTTP_MODULE), ("grpc", GRPC_MODULE)])
def test_otlp_exporter_gets_the_spans(
    monkeypatch: pytest.MonkeyPatch, protocol: str, module: str, tmp_path: Path
) -> None:
    exporter = InMemorySpanExporter()
    fake_otlp(monkeypatch, exporter, module)
    path = tmp_path / "spans.jsonl"
    settings = TracingSettings(otlp=True, otlp_protocol=protocol, trace_file=path)
    tracing = configure("worker", settings, set_global=False)
    tracing.tracer("t").start_span("both").end()
    assert tracing.shutdown()
    assert [span.name for span in exporter.get_finished_spans()] == ["both"]
    assert [span["name"] for span in read_spans(path)] == ["both"]


@pytest.mark.parametrize(
    ("protocol", "message"),
    [
        ("http/protobuf", "needs the package opentelemetry-exporter-otlp-proto-http"),
        ("grpc", "needs the package opentelemetry-exporter-otlp-proto-grpc"),
        ("pigeon", "OTLP protocol 'pigeon' is none of http/protobuf, grpc"),
    ],
)
def test_missing_exporter_is_logged_and_the_file_goes_on(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    protocol: str,
    message: str,
) -> None:
    monkeypatch.setitem(sys.modules, HTTP_MODULE, None)
    monkeypatch.setitem(sys.modules, GRPC_MODULE, None)
    with caplog.at_level(logging.ERROR):
        alone: Tracing = configure("w", TracingSettings(otlp=True, otlp_protocol=protocol), set_global=False)
    assert not alone.enabled
    assert message in caplog.text
    settings = TracingSettings(otlp=True, otlp_protocol=protocol, trace_file=tmp_path / "spans.jsonl")
    with_file = configure("w", settings, set_global=False)
    assert with_file.enabled
    assert with_file.shutdown()


class Collector(BaseHTTPRequestHandler):
    """Keeps the bodies of `POST /v1/traces`."""

    bodies: list[tuple[str, bytes]]

    def do_POST(self) -> None:
        self.bodies.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Stay silent."""


def test_real_otlp_exporter_reaches_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(HTTP_MODULE)
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    Collector.bodies = []
    server = HTTPServer(("127.0.0.1", 0), Collector)
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    serving.start()
    try:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        tracing = configure("worker", set_global=False)
        tracing.tracer("t").start_span("over the wire").end()
        assert tracing.shutdown()
    finally:
        server.shutdown()
        serving.join(10)
        server.server_close()
    [(path, body)] = Collector.bodies
    request = service.ExportTraceServiceRequest.FromString(body)
    assert path == "/v1/traces"
    assert request.resource_spans[0].scope_spans[0].spans[0].name == "over the wire"
