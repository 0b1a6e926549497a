"""What operators change, and what becomes of it when a scheduler starts again."""

import pytest

from meshift.schemas.errors import InvalidRequest
from meshift.schemas.instances import PolicyStamp
from meshift.schemas.steering import KeptPolicy
from meshift.services.scheduler.policy.settings import PolicySettings
from meshift.services.scheduler.steering import Steering

START = PolicySettings()


def steering(incarnation: int = 1, start: PolicySettings = START) -> Steering:
    return Steering(incarnation, start)


def test_a_change_is_in_force_and_stamped() -> None:
    ours = steering()
    ours.change({"migration": {"out_below": 5}})
    ours.change({"policy": "llumnix"})
    assert ours.settings.out_below == 5
    assert ours.stamp == PolicyStamp(1, 2)
    assert ours.changes() == {"policy": "llumnix", "migration": {"out_below": 5.0}}


def test_a_refused_change_changes_nothing() -> None:
    ours = steering()
    with pytest.raises(InvalidRequest) as caught:
        ours.change({"migration": {"out_below": 5}, "dispatch": {"waiting_max": 0}})
    assert caught.value.param == "dispatch.waiting_max"
    assert (ours.settings, ours.stamp) == (START, PolicyStamp())


def test_what_is_set_back_is_no_change() -> None:
    ours = steering()
    ours.change({"migration": {"out_below": 5}})
    ours.change({"migration": {"out_below": None}})
    assert ours.changes() == {}
    assert ours.stamp == PolicyStamp(1, 2)


def test_a_new_scheduler_takes_what_was_kept_on_top_of_its_own_settings() -> None:
    ours = steering()
    ours.change({"migration": {"out_below": 5}})
    started = PolicySettings().replaced({"dispatch": {"waiting_max": 3}})
    theirs = steering(2, started)
    assert theirs.adopt(ours.kept())
    assert theirs.settings.out_below == 5
    assert theirs.settings.dispatch.waiting_max == 3
    assert theirs.stamp == ours.stamp
    assert not theirs.adopt(ours.kept()), "twice is once"


def test_what_it_was_told_itself_is_newer() -> None:
    ours = steering()
    for _ in range(5):
        ours.change({"migration": {"out_below": 5}})
    theirs = steering(2)
    theirs.change({"migration": {"out_below": 7}})
    assert not theirs.adopt(ours.kept())
    assert ours.adopt(theirs.kept()), "and the older one takes it"
    assert ours.settings.out_below == 7


def test_a_change_after_what_was_kept_is_the_newest() -> None:
    ours = steering()
    ours.change({"migration": {"out_below": 5}})
    theirs = steering(2)
    theirs.adopt(ours.kept())
    theirs.change({"policy": "llumnix"})
    assert theirs.stamp == PolicyStamp(2, 1)
    assert theirs.changes() == {"policy": "llumnix", "migration": {"out_below": 5.0}}


def test_what_another_release_kept_is_ignored_once() -> None:
    ours = steering(2)
    assert ours.adopt(KeptPolicy(stamp=PolicyStamp(1, 4), changes={"gone": True}))
    assert ours.settings == START
    assert ours.stamp == PolicyStamp(1, 4), "frontends need not give it again and again"
