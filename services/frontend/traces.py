"""The spans of one request at its frontend. A request's tasks run in its trace's context, whoever starts them."""

import contextvars
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from opentelemetry.trace import SpanContext, get_current_span, use_span

from meshift.schemas.errors import MeshError
from meshift.schemas.identity import Owner, RequestKey
from meshift.schemas.requests import Finish
from meshift.services.frontend.api import GenerateRequest
from meshift.tracing import names, spans


class Ended(Protocol):
    """What is told of a stream that has ended."""

    request: GenerateRequest
    attempt: int
    owner: Owner | None
    finish: Finish | None
    error: MeshError | None

    @property
    def output_tokens(self) -> int:
        """Length of its output."""


_NOTHING = nullcontext(spans.INVALID_SPAN)


class StreamTrace:
    """Of a request that nobody traces."""

    __slots__ = ()

    def current(self) -> AbstractContextManager[object]:
        """The request's span is the current one inside."""
        return _NOTHING

    def context(self) -> contextvars.Context | None:
        """For a new task of this request; None is the present one."""
        return None

    def step(self, name: str, attributes: spans.Attributes | None = None) -> AbstractContextManager[spans.Span]:
        """A span of a piece of work, below the current one."""
        return _NOTHING

    def submit(self, key: RequestKey, owner: Owner, resumed_from: int) -> AbstractContextManager[spans.Span]:
        """The span of a submission."""
        return _NOTHING

    def resume(self, attempt: int, lost: Owner | None) -> AbstractContextManager[spans.Span]:
        """The span of the search for a new owner; linked to the submission that is lost."""
        return _NOTHING

    def first_token(self) -> None:
        """It has come."""

    def owner_lost(self, owner: Owner | None, why: str) -> None:
        """The owner was given up."""

    def failed(self, error: BaseException) -> None:
        """It didn't come to an end of its own."""

    def end(self, stream: Ended) -> None:
        """It has ended."""


NO_TRACE = StreamTrace()


class RequestTrace(StreamTrace):
    """Of a request that is traced, or whose trace was begun by someone else and is passed on."""

    __slots__ = ("_context", "_span", "_submission", "_tracer")

    def __init__(self, tracer: spans.Tracer, request: GenerateRequest) -> None:
        self._tracer = tracer
        self._span = tracer.start_span(
            names.request_span(request.operation, request.model), attributes=_request_attributes(request)
        )
        self._submission: SpanContext | None = None
        with self.current():
            self._context = contextvars.copy_context()

    def current(self) -> AbstractContextManager[object]:
        return use_span(self._span, end_on_exit=False, record_exception=False, set_status_on_exception=False)

    def context(self) -> contextvars.Context | None:
        # A copy for each task: two of them must not see each other's spans.
        return self._context.copy()

    def step(self, name: str, attributes: spans.Attributes | None = None) -> AbstractContextManager[spans.Span]:
        return spans.child(self._tracer, name, attributes, kind=spans.SpanKind.CLIENT)

    def submit(self, key: RequestKey, owner: Owner, resumed_from: int) -> AbstractContextManager[spans.Span]:
        attributes: spans.Attributes = {
            names.REQUEST_ID: key.request_id,
            names.ATTEMPT: key.attempt,
            names.HOP: key.hop,
            names.OWNER: str(owner),
            names.RESUMED_FROM: resumed_from,
        }
        return _Submission(self, self.step(names.SUBMIT, attributes))

    def resume(self, attempt: int, lost: Owner | None) -> AbstractContextManager[spans.Span]:
        attributes: spans.Attributes = {names.ATTEMPT: attempt + 1, names.SOURCE: str(lost)}
        links = [spans.Link(self._submission, {names.ATTEMPT: attempt})] if self._submission is not None else None
        return spans.child(self._tracer, names.RESUME, attributes, links=links)

    def submitted(self, span: spans.Span) -> None:
        """The newest submission."""
        self._submission = span.get_span_context()

    def first_token(self) -> None:
        self._span.add_event(names.EVENT_FIRST_TOKEN)

    def owner_lost(self, owner: Owner | None, why: str) -> None:
        self._span.add_event(names.EVENT_OWNER_LOST, {names.OWNER: str(owner), names.REASON: why})

    def failed(self, error: BaseException) -> None:
        spans.fail(self._span, error)

    def end(self, stream: Ended) -> None:
        if self._span.is_recording():
            self._span.set_attributes(_end_attributes(stream))
            if stream.error is not None:
                self.failed(stream.error)
        self._span.end()


class _Submission(AbstractContextManager[spans.Span]):
    """Lets the trace know the span, for links."""

    def __init__(self, trace: RequestTrace, step: AbstractContextManager[spans.Span]) -> None:
        self._trace = trace
        self._step = step

    def __enter__(self) -> spans.Span:
        span = self._step.__enter__()
        self._trace.submitted(span)
        return span

    def __exit__(self, *error: object) -> bool | None:
        return self._step.__exit__(*error)  # type: ignore[arg-type]


def begin(tracer: spans.Tracer, request: GenerateRequest) -> StreamTrace:
    """A new request's trace, below the current span. What a client sent is passed on even without tracing here."""
    if tracer is spans.NO_TRACER and not get_current_span().get_span_context().is_valid:
        return NO_TRACE
    return RequestTrace(tracer, request)


def _request_attributes(request: GenerateRequest) -> dict[str, str | int | float]:
    sampling = request.sampling
    attributes: dict[str, str | int | float] = {
        names.OPERATION: request.operation,
        names.PROVIDER: "meshift",
        names.REQUEST_ID: request.request_id,
        names.RESPONSE_ID: request.request_id,
        names.REQUEST_MODEL: request.model,
        names.RESPONSE_MODEL: request.model,
        names.REQUEST_MAX_TOKENS: sampling.max_new_tokens,
        names.REQUEST_TEMPERATURE: sampling.temperature,
        names.REQUEST_TOP_P: sampling.top_p,
        names.PRIORITY_SCHEDULING: request.priority.scheduling,
        names.PRIORITY_EXECUTION: request.priority.execution,
        names.USAGE_INPUT_TOKENS: len(request.prompt),
    }
    if sampling.top_k > 0:
        attributes[names.REQUEST_TOP_K] = sampling.top_k
    if sampling.seed is not None:
        attributes[names.REQUEST_SEED] = sampling.seed
    return attributes


def _end_attributes(stream: Ended) -> dict[str, str | int | tuple[str, ...]]:
    finish = stream.finish
    attributes: dict[str, str | int | tuple[str, ...]] = {
        names.USAGE_OUTPUT_TOKENS: stream.output_tokens,
        names.ATTEMPT: stream.attempt,
        names.OWNER: str(stream.owner),
        names.RESPONSE_FINISH_REASONS: (finish.reason.value if finish is not None else _unfinished(stream),),
    }
    if finish is not None:
        attributes[names.USAGE_CACHED_TOKENS] = finish.cached_tokens
        attributes[names.PREEMPTIONS] = finish.preemptions
    return attributes


def _unfinished(stream: Ended) -> str:
    return "error" if stream.error is not None else "cancelled"
