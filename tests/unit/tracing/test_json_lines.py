"""Spans as lines: the same text as the SDK's."""

import random

import pytest
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, TracerProvider
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from meshift.tracing.json_lines import to_line
from meshift.tracing.spans import Attributes

RESOURCE = Resource.create({"service.name": "é", "service.instance.id": "w1"})
ATTRIBUTES: Attributes = {"text": 'ä\n"', "count": 3, "share": 0.1, "yes": True, "many": ("a", "b"), "numbers": (1, 2)}


def made(parent: SpanContext | None = None, links: list[Link] | None = None, start_ns: int = 1) -> Span:
    tracer = TracerProvider(resource=RESOURCE).get_tracer("t")
    context = None if parent is None else trace.set_span_in_context(trace.NonRecordingSpan(parent))
    span = tracer.start_span("naïve", context, kind=SpanKind.SERVER, links=links, start_time=start_ns)
    assert isinstance(span, Span)
    return span


def remote(rng: random.Random) -> SpanContext:
    return SpanContext(rng.getrandbits(100), rng.getrandbits(40), True, TraceFlags(1), TraceState([("k", "v")]))


@pytest.mark.parametrize("seed", range(20))
def test_the_same_text_as_the_sdk_s(seed: int) -> None:
    rng = random.Random(seed)
    start_ns = rng.randrange(1, 4_000_000_000_000_000_000)
    span = made(remote(rng) if seed % 2 else None, start_ns=start_ns)
    if seed % 3:
        span.set_attributes(ATTRIBUTES)
    if seed % 5 == 1:
        span.set_status(Status(StatusCode.ERROR, "it broke"))
    assert to_line(span) == span.to_json(indent=None), f"seed {seed}: not ended"
    span.end(start_ns + rng.randrange(10**12))
    assert to_line(span) == span.to_json(indent=None), f"seed {seed}"


def test_events_and_links_are_there() -> None:
    span = made(links=[Link(remote(random.Random(1)), {"a": 1})])
    span.add_event("e", {"b": 2})
    span.end(2)
    assert to_line(span) == span.to_json(indent=None)
    assert '"events": [{' in to_line(span)


def test_what_is_missing() -> None:
    span = ReadableSpan("bare")
    assert to_line(span) == span.to_json(indent=None)
