"""Both tables: every pair of state and event, and what must hold of the whole."""

import pytest

from meshift.schemas.moves import MoveOutcome
from meshift.services.worker.moves import destination_table, source_table
from meshift.services.worker.moves.destination_table import DestinationEvent, DestinationState
from meshift.services.worker.moves.source import OUTCOMES
from meshift.services.worker.moves.source_table import DEADLINE_HOLDS, END_HOLDS, FINAL, SourceEvent, SourceState
from tests.support.tables import check_pair, reachable

_S, _E = SourceState, SourceEvent
_D, _F = DestinationState, DestinationEvent


@pytest.mark.parametrize("state", SourceState)
@pytest.mark.parametrize("event", SourceEvent)
def test_every_pair_of_the_source(state: SourceState, event: SourceEvent) -> None:
    check_pair(source_table.TRANSITIONS, source_table.next_state, state, event)


@pytest.mark.parametrize("state", DestinationState)
@pytest.mark.parametrize("event", DestinationEvent)
def test_every_pair_of_the_destination(state: DestinationState, event: DestinationEvent) -> None:
    check_pair(destination_table.TRANSITIONS, destination_table.next_state, state, event)


def test_a_move_always_can_end() -> None:
    assert reachable(source_table.TRANSITIONS, _S.CHOOSING) == set(SourceState)
    for state in SourceState:
        assert reachable(source_table.TRANSITIONS, state) & FINAL
    assert set(OUTCOMES) == FINAL
    assert set(OUTCOMES.values()) == set(MoveOutcome)


def test_nothing_but_a_certain_answer_decides_after_the_commit_was_sent() -> None:
    """Neither a deadline nor a refusal of the engine."""
    undecided = {_S.COMMITTING, _S.ASKING, _S.FENCING}
    assert not undecided & DEADLINE_HOLDS
    for (before, event), after in source_table.TRANSITIONS.items():
        if before in undecided and after not in undecided:
            assert event in {_E.COMMITTED, _E.NOT_COMMITTED, _E.RAISED, _E.OVER}
        if after is _S.RELEASING:
            assert (before in undecided, event) == (True, _E.COMMITTED)


def test_a_frozen_request_is_resumed_or_released() -> None:
    for (before, _), after in source_table.TRANSITIONS.items():
        if after in FINAL and before not in {_S.CHOOSING, _S.RAISING, _S.REKEYING, _S.BEGINNING}:
            assert before in {_S.RESUMING, _S.RELEASING}


def test_where_the_end_of_the_request_ends_the_move() -> None:
    # Not where an answer is awaited that would otherwise come for nobody.
    assert _S.COMMITTING not in END_HOLDS
    assert {_S.ASKING, _S.FENCING, _S.COPYING, _S.FREEZING} <= END_HOLDS


def test_what_is_decided_at_the_destination_stays_so() -> None:
    for (before, event), after in destination_table.TRANSITIONS.items():
        if before in destination_table.FINAL:
            assert after is before, event
        if after is _D.COMMITTED and before is not after:
            assert (before, event) == (_D.COMMITTING, _F.DONE)


def test_the_destination_takes_every_message_in_every_state() -> None:
    messages = {_F.RESERVE, _F.COMMIT, _F.QUESTION, _F.ABORT}
    for state in DestinationState:
        for event in messages:
            assert (state, event) in destination_table.TRANSITIONS
        asked = destination_table.TRANSITIONS[state, _F.QUESTION]
        assert asked in destination_table.FINAL | {_D.COMMITTING}, "a question decides"
