"""The dispatch policy and the charges."""

from meshift.schemas.identity import Owner
from meshift.services.scheduler.charges import REPORTS_UNTIL_SEEN, Charges
from meshift.services.scheduler.policy.dispatch import Candidate, choose_instance
from meshift.services.scheduler.policy.freeness import dispatch_freeness
from tests.support.reports import load_report


def chosen(candidates: list[Candidate], demand: int = 10, turn: int = 0) -> str:
    decision = choose_instance(candidates, demand, turn)
    assert decision is not None
    assert decision.reason
    return decision.owner.instance_id


def busy(name: str, used: int, running: int, queued: int = 0) -> Candidate:
    report = load_report(name, used=used, free=1000 - used, running=running, queued_demand=queued)
    return Candidate(report, 0, 0)


def test_freeness_is_decode_steps_left() -> None:
    assert dispatch_freeness(load_report(), 0, 0) == 1000
    assert dispatch_freeness(load_report(used=400, free=600, running=3), 0, 0) == 200
    assert dispatch_freeness(load_report(used=400, free=600, running=3, queued_demand=300), 600, 0) == -100
    assert dispatch_freeness(load_report(used=100, reserved=50, headroom=50, free=850, running=2), 0, 0) == 400


def test_nobody_to_choose() -> None:
    assert choose_instance([], 10, 0) is None


def test_the_freest_takes_it() -> None:
    assert chosen([busy("a", 500, 5), busy("b", 200, 5), busy("c", 300, 5)]) == "b"


def test_one_with_room_before_a_freer_one_without() -> None:
    freer = busy("a", 940, 1)
    roomier = busy("b", 500, 100)
    assert dispatch_freeness(freer.report, 0, 0) > dispatch_freeness(roomier.report, 0, 0)
    assert chosen([freer, roomier], demand=100) == "b"
    assert chosen([freer, roomier], demand=50) == "a"


def test_cached_prefixes_are_room() -> None:
    full = Candidate(load_report("a", cached=900, free=100), 0, 0)
    assert full.room == 1000


def test_a_negative_one_takes_it_only_when_all_are() -> None:
    assert chosen([busy("a", 900, 1, queued=200), busy("b", 900, 1, queued=100)], demand=50) == "b"
    assert chosen([busy("a", 900, 1, queued=200), busy("b", 999, 1)], demand=50) == "b"


def test_ties_go_round_robin() -> None:
    idle = [busy(name, 0, 0) for name in "abc"]
    assert [chosen(idle, turn=turn) for turn in range(4)] == ["a", "b", "c", "a"]


def test_charges_keep_a_burst_from_herding() -> None:
    charges = Charges()
    loads = [load_report("a"), load_report("b")]
    places = []
    for turn in range(6):
        candidates = [Candidate(report, *charges.charged(report.owner)) for report in loads]
        decision = choose_instance(candidates, 100, turn)
        assert decision is not None
        charges.charge(decision.owner, 100)
        places.append(decision.owner.instance_id)
    assert sorted(places) == ["a"] * 3 + ["b"] * 3


def test_a_burst_does_not_go_past_an_instance_whose_report_is_old() -> None:
    charges = Charges()
    loads = [load_report("a", used=100, free=900, running=4), load_report("b")]
    places = []
    for turn in range(8):
        candidates = [Candidate(report, *charges.charged(report.owner)) for report in loads]
        decision = choose_instance(candidates, 20, turn)
        assert decision is not None
        charges.charge(decision.owner, 20)
        places.append(decision.owner.instance_id)
    assert places.count("a") >= 2, "its batch has ended since, but no report says so"


def test_a_charge_lasts_until_a_report_must_show_it() -> None:
    charges = Charges()
    owner = Owner(instance_id="a", incarnation=1)
    charges.charge(owner, 5)
    for _ in range(REPORTS_UNTIL_SEEN - 1):
        charges.on_report(owner)
    charges.charge(owner, 7)
    assert charges.charged(owner) == (12, 2)
    charges.on_report(owner)
    assert charges.charged(owner) == (7, 1)
    charges.forget(owner)
    assert charges.charged(owner) == (0, 0)
