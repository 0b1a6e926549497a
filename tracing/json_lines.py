"""Spans as JSON lines in a file: traces without a collector. One span a line, in the form of the SDK's
`to_json`."""

import json
import logging
import os
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

logger = logging.getLogger(__name__)


class JsonLinesExporter(SpanExporter):
    """Appends to `path`, whose folder is made if need be. Several processes may share the file: each batch
    is one append. Raises OSError if it can't be opened."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._lock = threading.Lock()
        self._file: int | None = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Write the spans; a failure is logged and loses them."""
        lines = "".join(to_line(span) + "\n" for span in spans).encode()
        with self._lock:
            if self._file is None:
                return SpanExportResult.FAILURE
            try:
                _write_all(self._file, lines)
            except OSError:
                logger.exception("%d spans are lost: can't write to %s", len(spans), self._path)
                return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
            self._file = None


def to_line(span: ReadableSpan) -> str:
    """The text of `span.to_json(indent=None)`, in a fraction of the time: that is most of what tracing to a file costs.

    Events and links are few, and left to the SDK.
    """
    context = span.context
    if context is None or span.events or span.links:
        return str(span.to_json(indent=None))
    status = {"status_code": span.status.status_code.name}
    if span.status.description:
        status["description"] = span.status.description
    fields: dict[str, object] = {
        "name": span.name,
        "context": {
            "trace_id": f"0x{context.trace_id:032x}",
            "span_id": f"0x{context.span_id:016x}",
            "trace_state": repr(context.trace_state),
        },
        "kind": str(span.kind),
        "parent_id": None if span.parent is None else f"0x{span.parent.span_id:016x}",
        "start_time": _iso(span.start_time),
        "end_time": _iso(span.end_time),
        "status": status,
        "attributes": None if span.attributes is None else dict(span.attributes),
        "events": [],
        "links": [],
    }
    return f'{json.dumps(fields)[:-1]}, "resource": {_resource(span.resource)}}}'


def _iso(time_ns: int | None) -> str | None:
    if not time_ns:
        return None
    return datetime.fromtimestamp(time_ns / 1e9, tz=UTC).isoformat(timespec="microseconds")[:26] + "Z"


@lru_cache(maxsize=16)
def _resource(resource: Resource) -> str:
    """Of a process there is one."""
    return json.dumps(json.loads(resource.to_json()))


def _write_all(file: int, data: bytes) -> None:
    """A write may take less than it was given, when a signal or a full disk cuts it short."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]
