"""Small help with spans."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from opentelemetry.trace import INVALID_SPAN, Link, NoOpTracer, Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.util.types import AttributeValue

from meshift.tracing import names

__all__ = [
    "INVALID_SPAN",
    "NO_TRACER",
    "Attributes",
    "Link",
    "Span",
    "SpanKind",
    "Tracer",
    "child",
    "error_status",
    "fail",
]

Attributes = Mapping[str, AttributeValue]

NO_TRACER: Tracer = NoOpTracer()
"""Tracing is off."""


def fail(span: Span, error: BaseException) -> None:
    """Mark a span as failed. The type is the mesh's error code where there is one."""
    error_status(span, str(getattr(error, "code", type(error).__name__)), str(error))


def error_status(span: Span, kind: str, text: str = "") -> None:
    """Likewise, where nothing was raised."""
    span.set_attribute(names.ERROR_TYPE, kind)
    span.set_status(Status(StatusCode.ERROR, text))


@contextmanager
def child(
    tracer: Tracer,
    name: str,
    attributes: Attributes | None = None,
    *,
    kind: SpanKind = SpanKind.INTERNAL,
    links: Sequence[Link] | None = None,
) -> Iterator[Span]:
    """A span that is the current one inside; what is raised marks it as failed. Without the traceback that the SDK
    would record: a refusal is no accident."""
    with tracer.start_as_current_span(
        name, attributes=attributes, kind=kind, links=links, record_exception=False, set_status_on_exception=False
    ) as span:
        try:
            yield span
        except BaseException as error:
            fail(span, error)
            raise
