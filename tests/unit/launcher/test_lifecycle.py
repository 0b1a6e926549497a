"""Every pair of the child's table."""

import itertools

import pytest

from meshift.services.launcher.lifecycle import ENDED, ChildChange, ChildState, LifecycleError, next_state

DECLARED = {
    ("starting", "said_ready"): "ready",
    ("starting", "crashed"): "backoff",
    ("starting", "gave_up"): "failed",
    ("starting", "left"): "stopped",
    ("starting", "stop_asked"): "stopping",
    ("ready", "crashed"): "backoff",
    ("ready", "gave_up"): "failed",
    ("ready", "left"): "stopped",
    ("ready", "stop_asked"): "stopping",
    ("backoff", "restarted"): "starting",
    ("backoff", "gave_up"): "failed",
    ("backoff", "stop_asked"): "stopped",
    ("stopping", "gone"): "stopped",
}


@pytest.mark.parametrize(("state", "change"), list(itertools.product(ChildState, ChildChange)))
def test_every_pair(state: ChildState, change: ChildChange) -> None:
    expected = DECLARED.get((state.value, change.value))
    if expected is None:
        with pytest.raises(LifecycleError, match=f"{state}.*{change}"):
            next_state(state, change)
    else:
        assert next_state(state, change) == expected


def test_nothing_leaves_an_ended_state() -> None:
    assert not [pair for pair in DECLARED if pair[0] in ENDED]
