"""Trace context in headers."""

import asyncio
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import Tracer

from meshift.tracing.propagation import attach, inject

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE_ID = 0x0AF7651916CD43DD8448EB211C80319C


@pytest.fixture
def tracer() -> Iterator[Tracer]:
    provider = TracerProvider(shutdown_on_exit=False)
    yield provider.get_tracer("test")
    provider.shutdown()


def current_trace_id() -> int:
    return trace.get_current_span().get_span_context().trace_id


def test_no_context_no_headers() -> None:
    assert inject() == {}


def test_headers_of_the_current_span(tracer: Tracer) -> None:
    with tracer.start_as_current_span("sender") as span:
        context = span.get_span_context()
        identity = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
        assert inject() == {"traceparent": identity}
        assert context.trace_flags.sampled
    assert inject() == {}


def test_receiver_continues_the_trace(tracer: Tracer) -> None:
    with tracer.start_as_current_span("sender") as sender:
        headers = inject()
    with attach(headers), tracer.start_as_current_span("receiver") as receiver:
        assert receiver.get_span_context().trace_id == sender.get_span_context().trace_id
        parent = getattr(receiver, "parent", None)
        assert parent is not None
        assert parent.span_id == sender.get_span_context().span_id
        assert parent.is_remote
    assert current_trace_id() == 0


def test_a_process_without_tracing_passes_the_context_on() -> None:
    headers = {"traceparent": PARENT, "tracestate": "vendor=1", "Nats-Msg-Id": "7"}
    with attach(headers):
        assert inject() == {"traceparent": PARENT, "tracestate": "vendor=1"}
    assert inject() == {}


@pytest.mark.parametrize(
    "headers",
    [
        None,
        {},
        {"other": "x"},
        {"traceparent": ""},
        {"traceparent": "nonsense"},
        {"traceparent": "00-" + "0" * 32 + "-b7ad6b7169203331-01"},
        {"traceparent": "ff" + PARENT[2:]},
        {"traceparent": PARENT + "x" * 600},
    ],
)
def test_no_or_malformed_header_changes_nothing(headers: dict[str, str] | None, tracer: Tracer) -> None:
    with tracer.start_as_current_span("outer") as outer, attach(headers):
        assert trace.get_current_span() is outer
    with attach(headers):
        assert inject() == {}


def test_detached_after_an_error() -> None:
    seen = []

    def fail() -> None:
        seen.append(current_trace_id())
        raise RuntimeError

    with pytest.raises(RuntimeError), attach({"traceparent": PARENT}):
        fail()
    assert seen == [TRACE_ID]
    assert current_trace_id() == 0


async def test_tasks_have_contexts_of_their_own() -> None:
    async def handle(traceparent: str) -> int:
        with attach({"traceparent": traceparent}):
            await asyncio.sleep(0)
            return current_trace_id()

    other = PARENT.replace("0af7", "1af7")
    seen = list(await asyncio.gather(handle(PARENT), handle(other)))
    assert seen == [TRACE_ID, TRACE_ID + (1 << 124)]
    assert current_trace_id() == 0
