"""The centralized scheduler."""

import pytest

from meshift.schemas.identity import Owner
from meshift.services.scheduler.policy.central import CentralTracker, TrackedInstance

A, B = Owner("a", 1), Owner("b", 1)


def test_it_knows_every_token_of_every_step() -> None:
    tracker = CentralTracker([TrackedInstance(A, 1000), TrackedInstance(B, 1000)])
    assert {tracker.dispatch("r1", 100), tracker.dispatch("r2", 50)} == {A, B}
    first = A if tracker.load(A) == 100 else B
    second = B if first == A else A
    assert tracker.dispatch("r3", 10) == second, "the least loaded"
    for _ in range(60):
        tracker.on_step(second, ["r2", "r3"], [])
    assert tracker.load(second) == 60 + 2 * 60
    assert tracker.dispatch("r4", 10) == first
    tracker.on_step(second, ["r2", "r3"], ["r2"])
    assert tracker.load(second) == 10 + 61
    assert tracker.requests() == 3
    tracker.on_step(second, ["never seen"], ["r2"])
    assert tracker.load(second) == 10 + 61


def test_ties_go_round_robin() -> None:
    tracker = CentralTracker([TrackedInstance(A, 1000), TrackedInstance(B, 1000)])
    assert [tracker.dispatch(f"r{index}", 5) for index in range(4)].count(A) == 2


def test_nobody_to_choose() -> None:
    with pytest.raises(ValueError, match="empty"):
        CentralTracker([]).dispatch("r", 1)
