"""The five phases of a reconfiguration (PipeLive, algorithm 1) as one table.

    planning -> beginning -> resizing -> loading -> converging -> committing -> committed
        |           |            |          |     \\_________/        |
        v           +------------+----------+----------+-------------+---> aborting -> aborted
    refused, planned

Its worker is the one who knows: each order's answer, and each look, says where the change is there, and that is the
event here. So a coordinator that comes back, and finds a change that another one has begun, only has to look."""

from enum import StrEnum

from meshift.schemas.errors import InternalError
from meshift.schemas.reconfiguring import WorkerPhase


class State(StrEnum):
    """What is being done now."""

    PLANNING = "planning"
    """Phase 1: asks the worker what there is, and decides whether it can be."""
    BEGINNING = "beginning"
    """BEGIN: the instance has a change under way from now on."""
    ADOPTING = "adopting"
    """Looks how far a change is that was under way before this coordinator."""
    RESIZING = "resizing"
    """Phase 2: room for both layouts' layers."""
    LOADING = "loading"
    """Phase 3: weights and KV begin to go, while requests run."""
    CONVERGING = "converging"
    """Phase 4: looks how much lags."""
    COMMITTING = "committing"
    """Phase 5: every stage switches."""
    ABORTING = "aborting"
    COMMITTED = "committed"
    ABORTED = "aborted"
    """The instance is in its old layout, as if nothing had happened."""
    REFUSED = "refused"
    """Never begun."""
    PLANNED = "planned"
    """A dry run."""
    LOST = "lost"
    """The instance is gone."""


class Event(StrEnum):
    """What came of it."""

    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    DRY = "dry"
    """It was only to be planned."""
    DECLINED = "declined"
    """The worker doesn't begin it."""
    BEGUN = "begun"
    """At its worker, as are the next ones."""
    RESIZED = "resized"
    BEHIND = "behind"
    """It copies, and much lags."""
    CLOSE = "close"
    """It copies, weights are there, and little lags."""
    COMMITTING = "committing"
    COMMITTED = "committed"
    ABORTING = "aborting"
    ABORTED = "aborted"
    ELSEWHERE = "elsewhere"
    """It is not where this step leads: another coordinator drives it too, or an answer was late. Look."""
    NOTHING = "nothing"
    """The worker knows no such change."""
    GIVE_UP = "give_up"
    """An operator cancels it, or its deadline came."""
    SILENT = "silent"
    """No answer: again."""
    GONE = "gone"
    """The instance, or that incarnation of it."""


_S, _E = State, Event

TRANSITIONS: dict[tuple[State, Event], State] = {
    (_S.PLANNING, _E.FEASIBLE): _S.BEGINNING,
    (_S.PLANNING, _E.INFEASIBLE): _S.REFUSED,
    (_S.PLANNING, _E.DRY): _S.PLANNED,
    (_S.PLANNING, _E.DECLINED): _S.REFUSED,
    (_S.PLANNING, _E.GIVE_UP): _S.REFUSED,
    (_S.PLANNING, _E.SILENT): _S.PLANNING,
    (_S.PLANNING, _E.GONE): _S.LOST,
    (_S.BEGINNING, _E.BEGUN): _S.RESIZING,
    (_S.BEGINNING, _E.DECLINED): _S.REFUSED,
    (_S.BEGINNING, _E.ABORTED): _S.REFUSED,
    (_S.BEGINNING, _E.ABORTING): _S.ABORTING,
    (_S.BEGINNING, _E.GIVE_UP): _S.ABORTING,
    (_S.BEGINNING, _E.SILENT): _S.BEGINNING,
    (_S.BEGINNING, _E.ELSEWHERE): _S.ADOPTING,
    (_S.BEGINNING, _E.GONE): _S.LOST,
    (_S.ADOPTING, _E.BEGUN): _S.RESIZING,
    (_S.ADOPTING, _E.RESIZED): _S.LOADING,
    (_S.ADOPTING, _E.BEHIND): _S.CONVERGING,
    (_S.ADOPTING, _E.CLOSE): _S.CONVERGING,
    (_S.ADOPTING, _E.COMMITTING): _S.COMMITTING,
    (_S.ADOPTING, _E.COMMITTED): _S.COMMITTED,
    (_S.ADOPTING, _E.ABORTING): _S.ABORTING,
    (_S.ADOPTING, _E.ABORTED): _S.ABORTED,
    (_S.ADOPTING, _E.NOTHING): _S.LOST,
    (_S.ADOPTING, _E.GIVE_UP): _S.ABORTING,
    (_S.ADOPTING, _E.SILENT): _S.ADOPTING,
    (_S.ADOPTING, _E.GONE): _S.LOST,
    (_S.RESIZING, _E.RESIZED): _S.LOADING,
    (_S.RESIZING, _E.ABORTING): _S.ABORTING,
    (_S.RESIZING, _E.ABORTED): _S.ABORTED,
    (_S.RESIZING, _E.NOTHING): _S.LOST,
    (_S.RESIZING, _E.GIVE_UP): _S.ABORTING,
    (_S.RESIZING, _E.SILENT): _S.RESIZING,
    (_S.RESIZING, _E.ELSEWHERE): _S.ADOPTING,
    (_S.RESIZING, _E.GONE): _S.LOST,
    (_S.LOADING, _E.BEHIND): _S.CONVERGING,
    (_S.LOADING, _E.CLOSE): _S.CONVERGING,
    (_S.LOADING, _E.ABORTING): _S.ABORTING,
    (_S.LOADING, _E.ABORTED): _S.ABORTED,
    (_S.LOADING, _E.NOTHING): _S.LOST,
    (_S.LOADING, _E.GIVE_UP): _S.ABORTING,
    (_S.LOADING, _E.SILENT): _S.LOADING,
    (_S.LOADING, _E.ELSEWHERE): _S.ADOPTING,
    (_S.LOADING, _E.GONE): _S.LOST,
    (_S.CONVERGING, _E.BEHIND): _S.CONVERGING,
    (_S.CONVERGING, _E.CLOSE): _S.COMMITTING,
    (_S.CONVERGING, _E.COMMITTING): _S.COMMITTING,
    (_S.CONVERGING, _E.COMMITTED): _S.COMMITTED,
    (_S.CONVERGING, _E.ABORTING): _S.ABORTING,
    (_S.CONVERGING, _E.ABORTED): _S.ABORTED,
    (_S.CONVERGING, _E.NOTHING): _S.LOST,
    (_S.CONVERGING, _E.GIVE_UP): _S.ABORTING,
    (_S.CONVERGING, _E.SILENT): _S.CONVERGING,
    (_S.CONVERGING, _E.ELSEWHERE): _S.ADOPTING,
    (_S.CONVERGING, _E.GONE): _S.LOST,
    (_S.COMMITTING, _E.COMMITTED): _S.COMMITTED,
    (_S.COMMITTING, _E.COMMITTING): _S.COMMITTING,
    (_S.COMMITTING, _E.BEHIND): _S.CONVERGING,
    (_S.COMMITTING, _E.CLOSE): _S.CONVERGING,
    (_S.COMMITTING, _E.ABORTING): _S.ABORTING,
    (_S.COMMITTING, _E.ABORTED): _S.ABORTED,
    (_S.COMMITTING, _E.NOTHING): _S.LOST,
    (_S.COMMITTING, _E.GIVE_UP): _S.ABORTING,
    (_S.COMMITTING, _E.SILENT): _S.COMMITTING,
    (_S.COMMITTING, _E.ELSEWHERE): _S.ADOPTING,
    (_S.COMMITTING, _E.GONE): _S.LOST,
    (_S.ABORTING, _E.ABORTED): _S.ABORTED,
    (_S.ABORTING, _E.ABORTING): _S.ABORTING,
    (_S.ABORTING, _E.COMMITTING): _S.ABORTING,
    (_S.ABORTING, _E.COMMITTED): _S.COMMITTED,
    (_S.ABORTING, _E.NOTHING): _S.ABORTED,
    (_S.ABORTING, _E.SILENT): _S.ABORTING,
    (_S.ABORTING, _E.GONE): _S.LOST,
}

FINAL = frozenset({_S.COMMITTED, _S.ABORTED, _S.REFUSED, _S.PLANNED, _S.LOST})

GIVES_UP = frozenset(state for state, event in TRANSITIONS if event is _E.GIVE_UP)

AT_WORKER = {
    WorkerPhase.BEGINNING: _E.BEGUN,
    WorkerPhase.BEGUN: _E.BEGUN,
    WorkerPhase.RESIZING: _E.BEGUN,
    WorkerPhase.RESIZED: _E.RESIZED,
    WorkerPhase.STARTING: _E.RESIZED,
    WorkerPhase.COPYING: _E.BEHIND,
    WorkerPhase.CLOSING: _E.COMMITTING,
    WorkerPhase.COMMITTING: _E.COMMITTING,
    WorkerPhase.ASKING: _E.COMMITTING,
    WorkerPhase.GROWING: _E.COMMITTING,
    WorkerPhase.COMMITTED: _E.COMMITTED,
    WorkerPhase.ABORTING: _E.ABORTING,
    WorkerPhase.RESTORING: _E.ABORTING,
    WorkerPhase.ABORTED: _E.ABORTED,
}
"""What is known when the worker says where it is. Copying may turn out to be close."""


def next_state(state: State, event: Event) -> State:
    """The state after `event`. Raises InternalError for a pair that the table doesn't have."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise InternalError(f"a reconfiguration that is {state} can't take {event}") from None
