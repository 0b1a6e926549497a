"""The spans of one move: a trace of its own, linked to the request's."""

from contextlib import AbstractContextManager, nullcontext

from opentelemetry import trace
from opentelemetry.context import Context

from meshift.backends.base import DeltaSent
from meshift.schemas.identity import Owner
from meshift.schemas.moves import MoveMode, MoveOutcome, MoveReport
from meshift.services.worker.moves.source_table import SourceState
from meshift.services.worker.requests import RequestRecord
from meshift.tracing import names, spans

_S = SourceState

STEPS = {
    _S.RESERVING: names.MOVE_RESERVE,
    _S.COPYING: names.MOVE_ROUND,
    _S.FREEZING: names.MOVE_FREEZE,
    _S.COMMITTING: names.MOVE_COMMIT,
    _S.ASKING: names.MOVE_ASK,
    _S.FENCING: names.MOVE_FENCE,
    _S.RAISING: names.MOVE_FENCE,
    _S.RELEASING: names.MOVE_RELEASE,
    _S.RESUMING: names.MOVE_RESUME,
}
"""States without a name have no span."""

_NOTHING = nullcontext()


class MoveTrace:
    """Of a move that nobody traces."""

    __slots__ = ()

    @staticmethod
    def begin(tracer: spans.Tracer, record: RequestRecord, source: Owner, mode: MoveMode) -> "MoveTrace":
        """Of a move that begins now."""
        if tracer is spans.NO_TRACER:
            return NO_MOVE_TRACE
        return RecordedMove(tracer, record, source, mode)

    def step(self, state: SourceState) -> AbstractContextManager[object]:
        """The span of what is done in that state."""
        return _NOTHING

    def of_request(self) -> AbstractContextManager[object]:
        """What is sent inside belongs to the request's trace."""
        return _NOTHING

    def round(self, delta: DeltaSent) -> None:
        """What a round came to; inside its step."""

    def end(self, report: MoveReport) -> None:
        """It has ended."""


NO_MOVE_TRACE = MoveTrace()


class RecordedMove(MoveTrace):
    """Of one that is."""

    __slots__ = ("_context", "_request", "_span", "_step", "_tracer")

    def __init__(self, tracer: spans.Tracer, record: RequestRecord, source: Owner, mode: MoveMode) -> None:
        self._tracer = tracer
        self._request = record.trace.span if record.trace is not None else spans.INVALID_SPAN
        ordered = trace.get_current_span().get_span_context()
        contexts = [self._request.get_span_context(), ordered]
        request_id, attempt, hop = record.key
        self._span = tracer.start_span(
            names.MOVE,
            Context(),
            links=[spans.Link(context) for context in contexts if context.is_valid],
            attributes={
                names.REQUEST_ID: request_id,
                names.ATTEMPT: attempt,
                names.HOP: hop + 1,
                names.SOURCE: str(source),
                names.MOVE_MODE: mode.value,
            },
        )
        self._context = trace.set_span_in_context(self._span)
        self._step: spans.Span = spans.INVALID_SPAN

    def step(self, state: SourceState) -> AbstractContextManager[object]:
        name = STEPS.get(state)
        if name is None:
            return trace.use_span(self._span, end_on_exit=False, record_exception=False)
        self._step = self._tracer.start_span(name, self._context)
        return trace.use_span(self._step, end_on_exit=True, record_exception=False)

    def of_request(self) -> AbstractContextManager[object]:
        span = self._request if self._request.get_span_context().is_valid else self._step
        return trace.use_span(span, end_on_exit=False, record_exception=False, set_status_on_exception=False)

    def round(self, delta: DeltaSent) -> None:
        attributes: spans.Attributes = {
            names.TRANSFER_TOKENS: delta.end - delta.start,
            names.TRANSFER_BYTES: delta.byte_count,
            names.TRANSFER_WATERMARK: delta.end,
            names.TRANSFER_GATHER: delta.gather_ns / 1e9,
            names.TRANSFER_DURATION: delta.transfer_ns / 1e9,
        }
        self._step.set_attributes(attributes)
        # The round has just ended, and the transfer with it: a span that is never ended, nor recorded, tells the time.
        # In simulation the engine's clock isn't the SDK's.
        now_ns, begin_ns = _start_ns(self._tracer.start_span(names.MOVE_TRANSFER)), _start_ns(self._step)
        transfer = self._tracer.start_span(
            names.MOVE_TRANSFER, attributes=attributes, start_time=max(begin_ns, now_ns - delta.transfer_ns)
        )
        transfer.end(now_ns)

    def end(self, report: MoveReport) -> None:
        figures = report.figures
        self._span.set_attributes(
            {
                names.DESTINATION: str(report.destination),
                names.MOVE_MODE: report.mode.value,
                names.MOVE_OUTCOME: report.outcome.value if report.outcome is not None else report.phase,
                names.MOVE_ROUNDS: figures.rounds,
                names.TRANSFER_TOKENS: figures.tokens,
                names.TRANSFER_BYTES: figures.byte_count,
                names.TRANSFER_GATHER: figures.gather_ns / 1e9,
                names.TRANSFER_DURATION: figures.transfer_ns / 1e9,
                names.MOVE_FROZEN: figures.frozen_ns / 1e9,
            }
        )
        if report.refusal is not None:
            self._span.set_attribute(names.MOVE_REFUSAL, report.refusal.value)
        if report.outcome is not MoveOutcome.MOVED:
            spans.error_status(self._span, str(report.refusal or report.phase), report.reason)
        self._span.end()


def _start_ns(span: spans.Span) -> int:
    # Recording spans of the SDK have it; the API's interface doesn't name it.
    return int(getattr(span, "start_time", 0) or 0)
