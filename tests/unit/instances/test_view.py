"""What is known of instances."""

from meshift.schemas.identity import Owner
from meshift.services.instances import InstanceView
from tests.support.reports import load_report


def owners(view: InstanceView) -> list[str]:
    return [str(known.owner) for known in view]


def test_instances_come_in_the_order_of_their_ids() -> None:
    view = InstanceView(2.0)
    for name in ("c", "a", "b"):
        view.on_report(load_report(name), 0.0)
    assert owners(view) == ["a#1", "b#1", "c#1"]
    assert len(view) == 3


def test_the_newest_incarnation_wins() -> None:
    view = InstanceView(2.0)
    view.on_report(load_report("a", 1, sequence=50), 0.0)
    lost = view.on_report(load_report("a", 2, sequence=1), 0.1)
    assert [str(owner) for owner in lost] == ["a#1"]
    assert view.on_report(load_report("a", 1, sequence=51), 0.2) == []
    assert owners(view) == ["a#2"]


def test_an_old_report_changes_nothing() -> None:
    view = InstanceView(2.0)
    view.on_report(load_report("a", sequence=2, used=10, free=990), 0.0)
    view.on_report(load_report("a", sequence=1, used=0), 1.0)
    known = view.get(Owner(instance_id="a", incarnation=1))
    assert known is not None
    assert known.report.used == 10
    assert known.seen_s == 0.0


def test_a_silent_instance_expires_and_comes_back() -> None:
    view = InstanceView(2.0)
    view.on_report(load_report("a", sequence=1), 0.0)
    view.on_report(load_report("b", sequence=1), 1.0)
    assert view.expire(1.9) == []
    assert [str(owner) for owner in view.silent(1.9, 1.0)] == ["a#1"]
    assert [str(owner) for owner in view.expire(2.5)] == ["a#1"]
    assert owners(view) == ["b#1"]
    view.on_report(load_report("a", sequence=2), 3.0)
    assert owners(view) == ["a#1", "b#1"]


def test_one_that_said_it_goes_never_comes_back() -> None:
    view = InstanceView(2.0)
    view.on_report(load_report("a", sequence=1), 0.0)
    assert view.on_gone(Owner(instance_id="a", incarnation=1))
    assert not view.on_gone(Owner(instance_id="a", incarnation=1))
    view.on_report(load_report("a", sequence=2), 0.1)
    assert owners(view) == []
    view.on_report(load_report("a", incarnation=2), 0.2)
    assert owners(view) == ["a#2"]


def test_a_late_goodbye_of_an_older_incarnation_spares_the_new_one() -> None:
    view = InstanceView(2.0)
    view.on_report(load_report("a", incarnation=2), 0.0)
    assert not view.on_gone(Owner(instance_id="a", incarnation=1))
    assert owners(view) == ["a#2"]


def test_a_goodbye_that_overtakes_the_first_report() -> None:
    view = InstanceView(2.0)
    view.on_gone(Owner(instance_id="a", incarnation=1))
    view.on_report(load_report("a"), 0.0)
    assert owners(view) == []


def test_a_forgotten_one_comes_back_when_it_is_heard() -> None:
    view = InstanceView(2.0)
    view.on_report(load_report("a", sequence=1), 0.0)
    assert view.forget(Owner("a", 1))
    assert not view.forget(Owner("a", 1))
    view.on_report(load_report("a", sequence=2), 0.1)
    assert owners(view) == ["a#1"]
