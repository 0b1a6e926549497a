"""The restart policy, as a function."""

from dataclasses import replace

import pytest

from meshift.services.launcher.restart import (
    HEALTHY_AFTER_S,
    RESTART_ASKED_STATUS,
    RESTART_DELAY_S_FIRST,
    RESTART_DELAY_S_MAX,
    RESTARTS_IN_VAIN_MAX,
    Ended,
    GiveUp,
    Leave,
    Restart,
    decide_restart,
)
from meshift.services.process import EXIT_RESTART

CRASH = Ended(exit_status=-9, ever_ready=True, ready_s=1.0, failures=0)


def test_the_first_crash_is_answered_soon() -> None:
    assert decide_restart(CRASH) == Restart(RESTART_DELAY_S_FIRST, failures=1)


def test_delays_double_up_to_the_bound_and_then_it_gives_up() -> None:
    delays, ended = [], CRASH
    while isinstance(decision := decide_restart(ended), Restart):
        delays.append(decision.delay_s)
        ended = replace(ended, failures=decision.failures)
    assert delays[:4] == [0.5, 1.0, 2.0, 4.0]
    assert delays == sorted(delays)
    assert delays[-1] == RESTART_DELAY_S_MAX
    assert len(delays) == RESTARTS_IN_VAIN_MAX
    assert decision == GiveUp(f"{RESTARTS_IN_VAIN_MAX} restarts did not help")


@pytest.mark.parametrize("failures", [1, RESTARTS_IN_VAIN_MAX])
def test_a_healthy_life_forgives_earlier_failures(failures: int) -> None:
    ended = replace(CRASH, failures=failures, ready_s=HEALTHY_AFTER_S)
    assert decide_restart(ended) == Restart(RESTART_DELAY_S_FIRST, failures=1)


def test_a_clean_end_is_left_alone() -> None:
    assert decide_restart(replace(CRASH, exit_status=0)) == Leave()
    assert decide_restart(replace(CRASH, exit_status=0, ever_ready=False)) == Leave()


def test_a_restart_that_was_asked_for_is_done_at_once() -> None:
    assert RESTART_ASKED_STATUS == EXIT_RESTART
    asked = replace(CRASH, exit_status=RESTART_ASKED_STATUS, failures=RESTARTS_IN_VAIN_MAX)
    assert decide_restart(asked) == Restart(0.0, failures=0)
    assert isinstance(decide_restart(replace(asked, ever_ready=False)), GiveUp)


def test_what_was_never_ready_is_not_tried_again() -> None:
    assert decide_restart(replace(CRASH, exit_status=1, ever_ready=False)) == GiveUp("it did not start")
