"""The spans of one request at its worker. What the engine did is told from what the worker sees of it: the submission,
the first tokens, the finish. The SDK stamps those; nothing here reads a clock."""

from opentelemetry import trace

from meshift.backends.base import TokenEvent
from meshift.schemas.base import count_tokens
from meshift.schemas.identity import Owner
from meshift.schemas.moves import MoveCommit
from meshift.schemas.requests import Finish, Submit
from meshift.tracing import names, spans


class RequestTrace:
    """From the submission to the finish."""

    __slots__ = ("_context", "_decode", "_span", "_tokens", "_tracer")

    def __init__(self, tracer: spans.Tracer, span: spans.Span) -> None:
        self._tracer = tracer
        self._span = span
        self._context = trace.set_span_in_context(span)
        self._decode: spans.Span | None = None
        self._tokens = 0

    @property
    def span(self) -> spans.Span:
        """For links, and for what belongs below it."""
        return self._span

    def on_event(self, event: TokenEvent) -> None:
        """Tokens, or the finish, or both."""
        self._tokens += len(event.tokens)
        if self._decode is None and event.tokens:
            self._first_tokens(event)
        if event.finish is not None:
            self._finish(event.finish)

    def decodes(self) -> None:
        """It came with its KV: there is nothing to wait for or to compute first."""
        self._decode = self._tracer.start_span(names.DECODE, self._context)

    def moved(self, destination: Owner) -> None:
        """It goes on there."""
        if self._span.is_recording():
            self._span.set_attributes({names.USAGE_OUTPUT_TOKENS: self._tokens, names.DESTINATION: str(destination)})
            self._span.add_event(names.EVENT_OWNER_CHANGED, {names.OWNER: str(destination)})
            self._end()

    def abandon(self, reason: str) -> None:
        """The instance serves no more. Idempotent; harmless after the finish."""
        if self._span.is_recording():
            self._span.set_status(trace.Status(trace.StatusCode.ERROR, reason))
            self._end()

    def _first_tokens(self, event: TokenEvent) -> None:
        """The start of decoding is the end of the prefill, which began when queueing ended."""
        self._decode = self._tracer.start_span(names.DECODE, self._context)
        begin_ns, first_ns = _start_ns(self._span), _start_ns(self._decode)
        prefill_ns = begin_ns
        if event.queued_ns is not None:
            # An engine's clock may not be the SDK's: in simulation it isn't.
            prefill_ns = min(begin_ns + event.queued_ns, first_ns)
            queue = self._tracer.start_span(names.QUEUE, self._context, start_time=begin_ns)
            queue.end(prefill_ns)
        prefill = self._tracer.start_span(names.PREFILL, self._context, start_time=prefill_ns)
        prefill.end(first_ns)

    def _finish(self, finish: Finish) -> None:
        self._span.set_attributes(
            {
                names.USAGE_OUTPUT_TOKENS: self._tokens,
                names.USAGE_CACHED_TOKENS: finish.cached_tokens,
                names.PREEMPTIONS: finish.preemptions,
                names.PREEMPTION_LOSS: finish.preemption_loss_ns / 1e9,
                names.RESPONSE_FINISH_REASONS: (finish.reason.value,),
            }
        )
        if finish.message:
            self._span.set_status(trace.Status(trace.StatusCode.ERROR, finish.message))
        self._end()

    def _end(self) -> None:
        if self._decode is not None:
            self._decode.set_attribute(names.USAGE_OUTPUT_TOKENS, self._tokens)
            self._decode.end()
        self._span.end()


def begin(tracer: spans.Tracer, asked: Submit | MoveCommit, owner: Owner, resumed_from: int) -> RequestTrace | None:
    """Of a submission that has just come, or of a move, below its sender's span; None if nobody records it."""
    if tracer is spans.NO_TRACER:
        return None
    span = tracer.start_span(names.GENERATE, kind=spans.SpanKind.SERVER)
    if not span.is_recording():
        return None
    span.set_attributes(
        {
            names.REQUEST_ID: asked.request_id,
            names.ATTEMPT: asked.attempt,
            names.HOP: asked.hop,
            names.OWNER: str(owner),
            names.RESUMED_FROM: resumed_from,
            names.USAGE_INPUT_TOKENS: count_tokens(asked.prompt),
        }
    )
    request = RequestTrace(tracer, span)
    if isinstance(asked, MoveCommit):
        span.set_attribute(names.SOURCE, str(asked.source))
        if asked.computed:
            request.decodes()
    return request


def _start_ns(span: spans.Span) -> int:
    # Recording spans of the SDK have it; the API's interface doesn't name it.
    return int(span.start_time)  # type: ignore[attr-defined]
