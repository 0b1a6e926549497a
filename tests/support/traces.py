"""Spans of a simulated mesh, kept in memory."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Sampler
from opentelemetry.trace import SpanContext

from meshift.tracing.spans import Tracer


@dataclass
class Node:
    """A span and those below it, in the order in which they began."""

    span: ReadableSpan
    children: "list[Node]" = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.span.name

    def attribute(self, name: str) -> Any:
        assert self.span.attributes is not None
        return self.span.attributes[name]

    def child(self, name: str) -> "Node":
        """The only one of that name."""
        (found,) = [node for node in self.children if node.name == name]
        return found

    def all(self, name: str) -> "list[Node]":
        """Those of that name, anywhere below."""
        below = [found for node in self.children for found in node.all(name)]
        return [node for node in self.children if node.name == name] + below

    def shape(self) -> Any:
        """Names alone: `(name, [shapes])`, or just the name of a leaf."""
        return (self.name, [node.shape() for node in self.children]) if self.children else self.name


class Recorder:
    """A tracer, and what it recorded."""

    def __init__(self, sampler: Sampler = ALWAYS_ON) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer: Tracer = provider.get_tracer("tests")

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        return self._exporter.get_finished_spans()

    def trees(self) -> list[Node]:
        """The roots of all traces: spans whose parents weren't recorded here."""
        nodes = {context_of(span).span_id: Node(span) for span in sorted(self.spans, key=begin_ns)}
        roots: list[Node] = []
        for node in nodes.values():
            parent = nodes.get(node.span.parent.span_id) if node.span.parent is not None else None
            (parent.children if parent is not None else roots).append(node)
        return roots


def context_of(span: ReadableSpan) -> SpanContext:
    """Its ids."""
    found = span.get_span_context()
    assert found is not None
    return found


def begin_ns(span: ReadableSpan) -> int:
    """When it began."""
    assert span.start_time is not None
    return span.start_time


def end_ns(span: ReadableSpan) -> int:
    """When it ended."""
    assert span.end_time is not None
    return span.end_time
