"""Spans as JSON lines in a file: traces without a collector. One span a line, in the form of the SDK's
`to_json`."""

import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

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
        lines = "".join(span.to_json(indent=None) + "\n" for span in spans).encode()
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


def _write_all(file: int, data: bytes) -> None:
    """A write may take less than it was given, when a signal or a full disk cuts it short."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]
