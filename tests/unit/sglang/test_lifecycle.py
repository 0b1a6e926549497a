"""Every pair of state and event is either in the table or refused."""

import itertools

import pytest

from meshift.backends.sglang.lifecycle import TRANSITIONS, EngineEvent, EngineState, IllegalTransition, next_state

PAIRS = list(itertools.product(EngineState, EngineEvent))


@pytest.mark.parametrize(("state", "event"), PAIRS)
def test_every_pair(state: EngineState, event: EngineEvent) -> None:
    if (state, event) in TRANSITIONS:
        assert next_state(state, event) is TRANSITIONS[state, event]
    else:
        with pytest.raises(IllegalTransition):
            next_state(state, event)


def test_every_state_can_be_stopped_and_stays_so() -> None:
    assert {next_state(state, EngineEvent.STOP) for state in EngineState} == {EngineState.STOPPED}
    after_stop = {target for (state, _), target in TRANSITIONS.items() if state is EngineState.STOPPED}
    assert after_stop == {EngineState.STOPPED}
