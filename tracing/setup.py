"""Turning tracing on, from the environment. Nothing set: nothing is started, and a span costs next to nothing.

- `OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`: send spans to this collector
- `OTEL_TRACES_EXPORTER`: `otlp` sends them to the standard local endpoint; `none` doesn't, whatever else is set
- `OTEL_EXPORTER_OTLP_PROTOCOL` (`..._TRACES_PROTOCOL`): `http/protobuf` (default) or `grpc`
- `MESHIFT_TRACE_FILE`: append spans to this file as JSON lines; several processes may share it
- `OTEL_TRACES_SAMPLER`, `OTEL_TRACES_SAMPLER_ARG`: what to keep, e.g. `parentbased_traceidratio` and `0.1`
- `OTEL_SDK_DISABLED`: `true` means no tracing at all

Headers, certificates, timeouts, batch sizes, resource attributes and limits are the SDK's own variables. The OTLP
exporters are packages of their own; without them, spans can still go to a file.
"""

import atexit
import importlib
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from opentelemetry import trace

from meshift.tracing.spans import NO_TRACER

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

logger = logging.getLogger(__name__)

TRACE_FILE_VARIABLE = "MESHIFT_TRACE_FILE"

SHUTDOWN_TIMEOUT_S = 5.0
"""How long a process waits at its end for spans to leave."""

_OTLP_MODULES = {
    "http/protobuf": (
        "opentelemetry.exporter.otlp.proto.http.trace_exporter",
        "opentelemetry-exporter-otlp-proto-http",
    ),
    "grpc": ("opentelemetry.exporter.otlp.proto.grpc.trace_exporter", "opentelemetry-exporter-otlp-proto-grpc"),
}


@dataclass(frozen=True, slots=True)
class TracingSettings:
    """Where spans go. The exporters and the SDK read their other variables themselves."""

    otlp: bool = False
    otlp_protocol: str = "http/protobuf"
    trace_file: Path | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> "TracingSettings":
        """Of this process, unless given. Empty variables count as unset."""
        get = (os.environ if environment is None else environment).get
        if (get("OTEL_SDK_DISABLED") or "").strip().lower() == "true":
            return cls()
        exporters = {name.strip() for name in (get("OTEL_TRACES_EXPORTER") or "").split(",")}
        endpoint = get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or get("OTEL_EXPORTER_OTLP_ENDPOINT")
        protocol = get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or get("OTEL_EXPORTER_OTLP_PROTOCOL")
        trace_file = get(TRACE_FILE_VARIABLE)
        return cls(
            otlp="none" not in exporters and bool(endpoint or "otlp" in exporters),
            otlp_protocol=protocol or "http/protobuf",
            trace_file=Path(trace_file) if trace_file else None,
        )


class Tracing:
    """What `configure` set up, to be shut down at the end of the process."""

    def __init__(self, provider: "TracerProvider | None") -> None:
        self._provider = provider
        if provider is not None:
            atexit.register(self.shutdown)

    @property
    def enabled(self) -> bool:
        """Whether spans go anywhere."""
        return self._provider is not None

    def tracer(self, name: str) -> trace.Tracer:
        """A tracer of this set-up; `name` is the module's. Without tracing, one that does nothing."""
        return NO_TRACER if self._provider is None else self._provider.get_tracer(name)

    def shutdown(self, timeout_s: float = SHUTDOWN_TIMEOUT_S) -> bool:
        """Send what is left and stop. False if that took longer than `timeout_s`: the rest is lost.
        Idempotent."""
        provider, self._provider = self._provider, None
        if provider is None:
            return True
        atexit.unregister(self.shutdown)
        # In a thread, since neither the provider nor an exporter in mid-air keeps a deadline.
        stopping = threading.Thread(target=provider.shutdown, name="tracing-shutdown", daemon=True)
        stopping.start()
        stopping.join(timeout_s)
        if stopping.is_alive():
            logger.warning("spans were not sent within %g s; the rest is lost", timeout_s)
        return not stopping.is_alive()


def configure(
    service_name: str,
    settings: TracingSettings | None = None,
    *,
    instance_id: str = "",
    set_global: bool = True,
) -> Tracing:
    """Set tracing up for this process, from the environment unless `settings` are given.

    With `set_global`, `opentelemetry.trace.get_tracer` uses it from now on. A trace file that can't be opened and a
    missing exporter package are logged, and what else is set goes on: a service that can't be watched still serves."""
    chosen = TracingSettings.from_environment() if settings is None else settings
    exporters = _exporters(chosen)
    if not exporters:
        return Tracing(None)
    provider = _provider(service_name, instance_id, exporters)
    if set_global:
        trace.set_tracer_provider(provider)
    return Tracing(provider)


def _provider(service_name: str, instance_id: str, exporters: "list[SpanExporter]") -> "TracerProvider":
    # Imported here, so that a process without tracing doesn't load the SDK.
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    attributes = {"service.name": service_name, "service.namespace": "meshift"}
    if instance_id:
        attributes["service.instance.id"] = instance_id
    # `Tracing` ends it at exit, with a deadline; by itself it would wait without one.
    provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
    for exporter in exporters:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _exporters(settings: TracingSettings) -> "list[SpanExporter]":
    exporters: list[SpanExporter] = []
    if settings.trace_file is not None:
        from meshift.tracing.json_lines import JsonLinesExporter

        try:
            exporters.append(JsonLinesExporter(settings.trace_file))
        except OSError as error:
            logger.error("no spans are written to %s=%s: %s", TRACE_FILE_VARIABLE, settings.trace_file, error.strerror)
    if settings.otlp:
        otlp = _otlp_exporter(settings.otlp_protocol)
        exporters += [otlp] if otlp is not None else []
    return exporters


def _otlp_exporter(protocol: str) -> "SpanExporter | None":
    if protocol not in _OTLP_MODULES:
        logger.error("no spans are sent: OTLP protocol %r is none of %s", protocol, ", ".join(_OTLP_MODULES))
        return None
    module, package = _OTLP_MODULES[protocol]
    try:
        exporter: SpanExporter = importlib.import_module(module).OTLPSpanExporter()
    except ModuleNotFoundError as error:
        logger.error("no spans are sent: OTLP over %s needs the package %s (%s)", protocol, package, error)
        return None
    return exporter
