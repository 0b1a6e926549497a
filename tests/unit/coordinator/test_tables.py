"""Both tables of a reconfiguration, the coordinator's and the worker's: every pair, and what must hold of the whole."""

import pytest

from meshift.schemas.reconfiguring import LayoutStep, ReconfigureOutcome, WorkerPhase
from meshift.services.coordinator import table as coordinator
from meshift.services.coordinator.record import OUTCOMES
from meshift.services.coordinator.table import AT_WORKER, Event, State
from meshift.services.coordinator.traces import PHASES
from meshift.services.worker.layouts import change, table
from meshift.services.worker.layouts.table import ChangeEvent
from tests.support.tables import check_pair, reachable

_P = WorkerPhase


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", Event)
def test_every_pair_of_the_coordinator(state: State, event: Event) -> None:
    check_pair(coordinator.TRANSITIONS, coordinator.next_state, state, event)


@pytest.mark.parametrize("phase", WorkerPhase)
@pytest.mark.parametrize("event", ChangeEvent)
def test_every_pair_of_the_worker(phase: WorkerPhase, event: ChangeEvent) -> None:
    check_pair(table.TRANSITIONS, table.next_phase, phase, event)


def test_a_reconfiguration_always_can_end() -> None:
    assert reachable(coordinator.TRANSITIONS, State.PLANNING) == set(State)
    assert reachable(table.TRANSITIONS, _P.BEGINNING) == set(WorkerPhase)
    for state in State:
        assert reachable(coordinator.TRANSITIONS, state) & coordinator.FINAL
    for phase in WorkerPhase:
        assert reachable(table.TRANSITIONS, phase) & table.FINAL
    assert set(OUTCOMES) == coordinator.FINAL
    assert set(OUTCOMES.values()) == set(ReconfigureOutcome)
    assert set(PHASES) == set(State) - coordinator.FINAL


def test_silence_and_loss_are_provided_for_everywhere() -> None:
    for state in set(State) - coordinator.FINAL:
        assert coordinator.next_state(state, Event.SILENT) is state
        assert coordinator.next_state(state, Event.GONE) is State.LOST


def test_a_returning_coordinator_knows_what_to_do_in_every_phase_of_the_worker() -> None:
    assert set(AT_WORKER) == set(WorkerPhase)
    for phase, event in AT_WORKER.items():
        after = coordinator.next_state(State.ADOPTING, event)
        ends = {_P.COMMITTED: State.COMMITTED, _P.ABORTED: State.ABORTED}
        assert after is ends.get(phase, after)
        assert after is not State.LOST


def test_once_the_log_may_have_the_commit_only_the_engine_s_word_undoes_it() -> None:
    undecided = {_P.COMMITTING, _P.ASKING}
    for (before, event), after in table.TRANSITIONS.items():
        if before in undecided and after not in undecided | {_P.GROWING}:
            assert event in {ChangeEvent.REFUSED, ChangeEvent.BROKEN, ChangeEvent.ENDED}
    # An engine that fails otherwise is asked.
    assert change.AFTER_A_BUG[_P.COMMITTING] is change.AFTER_A_BUG[_P.ASKING] is ChangeEvent.UNDECIDED
    for (before, event), after in table.TRANSITIONS.items():
        if before is _P.GROWING:
            assert (event, after) == (ChangeEvent.DONE, _P.COMMITTED)


def test_each_order_is_obeyed_in_one_phase() -> None:
    assert set(table.ACCEPTED) == table.RESTING
    assert set(table.ACCEPTED.values()) == set(LayoutStep) - {LayoutStep.BEGIN, LayoutStep.ABORT}
    for phase, step in table.ACCEPTED.items():
        assert (phase, change.EVENTS[step]) in table.TRANSITIONS
        assert (phase, ChangeEvent.ABORT) in table.TRANSITIONS
        assert (phase, ChangeEvent.ENDED) in table.TRANSITIONS
    # Whatever fails in a step leads somewhere.
    for phase in set(WorkerPhase) - table.FINAL - table.RESTING:
        event = change.AFTER_A_BUG.get(phase, ChangeEvent.BROKEN)
        assert (phase, event) in table.TRANSITIONS, phase
