"""The spans of one reconfiguration: a trace of its own, a span for each phase."""

from contextlib import AbstractContextManager, nullcontext

from opentelemetry import trace
from opentelemetry.context import Context

from meshift.schemas.identity import Owner
from meshift.schemas.layouts import counts_of
from meshift.schemas.reconfiguring import ChangeStatus, ReconfigureOutcome, ReconfigureReport
from meshift.services.coordinator.table import FINAL, State
from meshift.services.coordinator.wording import words_of
from meshift.tracing import names, spans

_NOTHING = nullcontext()
PHASES = {
    State.PLANNING: names.RECONFIGURE_FEASIBILITY,
    State.BEGINNING: names.RECONFIGURE_BEGIN,
    State.ADOPTING: names.RECONFIGURE_ADOPT,
    State.RESIZING: names.RECONFIGURE_RESIZE,
    State.LOADING: names.RECONFIGURE_LOAD,
    State.CONVERGING: names.RECONFIGURE_COPY,
    State.COMMITTING: names.RECONFIGURE_COMMIT,
    State.ABORTING: names.RECONFIGURE_ABORT,
}
GOOD = frozenset({ReconfigureOutcome.COMMITTED, ReconfigureOutcome.PLANNED})


class ReconfigureTrace:
    """Of one that nobody traces."""

    __slots__ = ()

    @staticmethod
    def begin(tracer: spans.Tracer, owner: Owner, change_id: str, *, adopted: bool) -> "ReconfigureTrace":
        """Of one that begins now."""
        if tracer is spans.NO_TRACER:
            return NO_TRACE
        return RecordedReconfiguration(tracer, owner, change_id, adopted)

    def enter(self, state: State) -> None:
        """Another phase begins."""

    def current(self) -> AbstractContextManager[object]:
        """What is sent inside belongs to the present phase."""
        return _NOTHING

    def look(self, change: ChangeStatus, lag_tokens: int) -> None:
        """How far it is now."""

    def end(self, report: ReconfigureReport) -> None:
        """It has ended."""


NO_TRACE = ReconfigureTrace()


class RecordedReconfiguration(ReconfigureTrace):
    """Of one that is."""

    __slots__ = ("_context", "_phase", "_span", "_tracer")

    def __init__(self, tracer: spans.Tracer, owner: Owner, change_id: str, adopted: bool) -> None:
        self._tracer = tracer
        ordered = trace.get_current_span().get_span_context()
        self._span = tracer.start_span(
            names.RECONFIGURE,
            Context(),
            links=[spans.Link(ordered)] if ordered.is_valid else [],
            attributes={
                names.OWNER: str(owner),
                names.LAYOUT_CHANGE: change_id,
                names.LAYOUT_ADOPTED: adopted,
            },
        )
        self._context = trace.set_span_in_context(self._span)
        self._phase = self._begin_phase(State.ADOPTING if adopted else State.PLANNING)

    def enter(self, state: State) -> None:
        self._phase.end()
        if state not in FINAL:
            self._phase = self._begin_phase(state)

    def current(self) -> AbstractContextManager[object]:
        return trace.use_span(self._phase, end_on_exit=False, record_exception=False, set_status_on_exception=False)

    def look(self, change: ChangeStatus, lag_tokens: int) -> None:
        loaded = sum(stage.layers_loaded for stage in change.stages)
        self._phase.add_event(
            names.LAYOUT_LOOK,
            {
                names.LAYOUT_LAG: lag_tokens,
                names.LAYOUT_LOADED: loaded,
                names.TRANSFER_BYTES: sum(stage.byte_count for stage in change.stages),
                names.LAYOUT_ROUNDS: sum(stage.rounds for stage in change.stages),
            },
        )

    def end(self, report: ReconfigureReport) -> None:
        self._phase.end()
        self._span.set_attributes(
            {
                names.LAYOUT_OUTCOME: report.phase if report.outcome is None else report.outcome.value,
                names.LAYOUT_EPOCH: report.epoch,
            }
        )
        if report.plan is not None:
            self._span.set_attribute(names.LAYOUT_FROM, words_of(counts_of(report.plan.current)))
            self._span.set_attribute(names.LAYOUT_TO, words_of(counts_of(report.plan.target)))
        if report.change is not None:
            self._span.set_attributes(_figures(report.change))
        if report.refusal is not None:
            self._span.set_attribute(names.LAYOUT_REFUSAL, report.refusal.value)
        if report.outcome not in GOOD:
            spans.error_status(self._span, str(report.refusal or report.phase), report.reason)
        self._span.end()

    def _begin_phase(self, state: State) -> spans.Span:
        return self._tracer.start_span(PHASES[state], self._context)


def _figures(change: ChangeStatus) -> spans.Attributes:
    return {
        names.LAYOUT_ROUNDS: sum(stage.rounds for stage in change.stages),
        names.TRANSFER_BYTES: sum(stage.byte_count for stage in change.stages),
        names.LAYOUT_LAST_TOKENS: change.last_patch_tokens,
        names.LAYOUT_LAST_BYTES: change.last_patch_bytes,
        names.LAYOUT_STOPS: [stop / 1e9 for stop in change.stop_ns],
        names.LAYOUT_MOVES_WAITED: change.moves_waited_ns / 1e9,
    }
