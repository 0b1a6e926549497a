"""The policies' settings."""

from typing import Any

import pytest

from meshift.schemas.errors import InvalidRequest
from meshift.services.scheduler.policy.settings import POLICIES, PolicySettings
from tests.unit.scheduler.kit import settings


def test_a_change_is_a_new_version_and_leaves_the_old_one() -> None:
    old = PolicySettings()
    new = old.replaced({"policy": "llumnix", "migration": {"out_below": 5}, "scaling": {"figure": "mean"}})
    assert (new.version, new.policy, new.migration.out_below) == (2, "llumnix", 5.0)
    assert new.migration.in_above == old.migration.in_above
    assert new.scaling.figure == "mean"
    assert (old.version, old.policy, old.migration.out_below) == (1, "meshift", None)
    assert new.replaced({}).version == 3
    unbound = new.replaced({"headroom": {"others_slower_max": None}})
    assert unbound.headroom.others_slower_max is None
    assert unbound.headroom.full_step_times == old.headroom.full_step_times


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"policy": "llumnix", "migration": {"out_below": 31}}, None),
        ({"migration": {"out_bellow": 3}}, "migration.out_bellow"),
        ({"migration": {"in_above": float("inf")}}, "migration.in_above"),
        ({"migration": 3}, "migration"),
        ({"scaling": {"low": 61.0}}, "scaling"),
        ({"scaling": {"instances_min": 20}}, "scaling"),
        ({"scaling": {"instances_min": 0}}, "scaling.instances_min"),
        ({"policy": "best"}, "policy"),
        ({"version": 7}, "version"),
        ({"dispatch": {"waiting_max": 0}}, "dispatch.waiting_max"),
        ({"headroom": {"others_slower_max": -0.01}}, "headroom.others_slower_max"),
        ({"headroom": {"full_step_times": 1}}, "headroom.full_step_times"),
    ],
)
def test_a_bad_change_names_its_field(changes: dict[str, Any], param: str | None) -> None:
    with pytest.raises(InvalidRequest) as refused:
        PolicySettings().replaced(changes)
    assert refused.value.param == param


def test_who_moves_and_who_sees_priorities() -> None:
    assert [name for name in POLICIES if settings(name).moves] == ["meshift", "llumnix", "llumnix-base"]
    assert [name for name in POLICIES if settings(name).sees_priorities] == ["meshift", "llumnix"]
    assert not settings("meshift", migration={"enabled": False}).moves
    assert [name for name in POLICIES if settings(name).requeues] == ["meshift"]
    assert not settings(migration={"requeue": False}).requeues


def test_thresholds_are_the_policy_s_own_unless_they_are_set() -> None:
    assert (settings("llumnix").out_below, settings().out_below) == (3.0, 10.0)
    assert (settings("llumnix").in_above, settings().in_above) == (30.0, 200.0)
    assert settings(migration={"out_below": 5}).out_below == 5.0
