"""Leases of frontends, and the stall watch."""

from meshift.schemas.identity import FrontendRef
from meshift.services.worker.leases import Leases
from meshift.services.worker.watchdog import StallWatch

OLD = FrontendRef(frontend_id="f", incarnation=1)
NEW = FrontendRef(frontend_id="f", incarnation=2)


def test_a_lease_ends_unless_it_is_renewed() -> None:
    leases = Leases()
    leases.renew(OLD, 5.0, 0.0)
    assert leases.is_live(OLD, 4.9)
    assert not leases.is_live(OLD, 5.0)
    leases.renew(OLD, 5.0, 4.0)
    assert leases.is_live(OLD, 8.9)


def test_a_shorter_renewal_does_not_shorten_it() -> None:
    leases = Leases()
    leases.renew(OLD, 10.0, 0.0)
    leases.renew(OLD, 1.0, 0.0)
    assert leases.is_live(OLD, 9.0)


def test_a_newer_incarnation_ends_the_older_ones_lease() -> None:
    leases = Leases()
    leases.renew(OLD, 5.0, 0.0)
    leases.renew(NEW, 5.0, 1.0)
    assert not leases.is_live(OLD, 1.0)
    assert leases.is_live(NEW, 1.0)
    leases.renew(OLD, 5.0, 2.0)
    assert not leases.is_live(OLD, 2.0)


def test_unknown_frontends_have_none_and_ended_ones_are_forgotten() -> None:
    leases = Leases()
    assert not leases.is_live(OLD, 0.0)
    leases.renew(NEW, 5.0, 0.0)
    leases.expire(100.0, 60.0)
    leases.renew(OLD, 5.0, 100.0)
    assert leases.is_live(OLD, 101.0)


def test_all_last_while_no_request_can_have_lost_its_frontend() -> None:
    leases = Leases()
    assert leases.all_last(0.0)
    leases.renew(OLD, 5.0, 0.0)
    leases.renew(FrontendRef(frontend_id="g", incarnation=7), 9.0, 0.0)
    assert leases.all_last(4.9)
    assert not leases.all_last(5.0)
    leases.renew(OLD, 5.0, 5.0)
    assert leases.all_last(5.0)


def test_not_all_last_once_a_frontend_was_superseded() -> None:
    for first, second in ((OLD, NEW), (NEW, OLD)):
        leases = Leases()
        leases.renew(first, 5.0, 0.0)
        leases.renew(second, 5.0, 0.0)
        assert not leases.all_last(1.0), "requests of the older one may be here"


def test_a_busy_engine_without_steps_is_stalled() -> None:
    watch = StallWatch(10.0)
    assert not watch.is_stalled(1, True, 0.0)
    assert not watch.is_stalled(1, True, 9.9)
    assert watch.is_stalled(1, True, 10.0)


def test_steps_and_idleness_reset_the_stall() -> None:
    watch = StallWatch(10.0)
    watch.is_stalled(1, True, 0.0)
    assert not watch.is_stalled(2, True, 9.0)
    assert not watch.is_stalled(2, False, 18.0)
    assert not watch.is_stalled(2, True, 27.0)
    assert watch.is_stalled(2, True, 28.0)
