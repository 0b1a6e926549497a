"""Every pair of the instance's table."""

import pytest

from meshift.schemas.errors import InternalError
from meshift.schemas.instances import InstanceState
from meshift.services.worker.lifecycle import TRANSITIONS, LifecycleEvent, has_ended, next_state


@pytest.mark.parametrize("state", list(InstanceState))
@pytest.mark.parametrize("event", list(LifecycleEvent))
def test_every_pair(state: InstanceState, event: LifecycleEvent) -> None:
    if (state, event) in TRANSITIONS:
        assert next_state(state, event) is TRANSITIONS[state, event]
        assert not has_ended(state)
    else:
        with pytest.raises(InternalError):
            next_state(state, event)


def test_an_instance_can_fail_at_any_time_before_its_end() -> None:
    for state in InstanceState:
        assert ((state, LifecycleEvent.FAILED) in TRANSITIONS) != has_ended(state)
