"""The dispatch policies and the charges."""

from typing import Any

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshift.schemas.identity import Owner
from meshift.schemas.instances import ClassLoad
from meshift.services.scheduler.charges import REPORTS_UNTIL_SEEN, Charges
from meshift.services.scheduler.dispatching import seen_by
from meshift.services.scheduler.policy.dispatch import choose_instance, fits
from meshift.services.scheduler.policy.freeness import dispatch_freeness, memory_load
from meshift.services.scheduler.policy.observation import InstanceObservation
from meshift.services.scheduler.policy.settings import POLICIES, PolicyName, PolicySettings
from tests.support.reports import load_report
from tests.unit.scheduler.kit import PLAIN, instance, instances, settings

MESHIFT = PLAIN


def chosen(
    candidates: list[InstanceObservation], demand: int = 10, turn: int = 0, policy: PolicySettings = MESHIFT
) -> str | None:
    decision = choose_instance(candidates, demand, turn, policy)
    assert decision is not None
    assert decision.reason
    return decision.owner.instance_id if decision.owner is not None else None


def test_freeness_is_decode_steps_left() -> None:
    assert dispatch_freeness(instance()) == 1000
    assert dispatch_freeness(instance(used=400, running=3)) == 200
    assert dispatch_freeness(instance(used=400, running=3, queued_demand=300, charged=(600, 0))) == -100
    assert dispatch_freeness(instance(used=100, reserved=50, headroom=50, running=2)) == 400
    assert dispatch_freeness(instance(used=100, headroom=50, running=2), headroom=False) == 450


def test_nobody_to_choose() -> None:
    assert choose_instance([], 10, 0, MESHIFT) is None


@pytest.mark.parametrize("policy", ["meshift", "llumnix", "llumnix-base"])
def test_the_freest_takes_it(policy: PolicyName) -> None:
    loads = [instance(name, used=used, running=5) for name, used in (("a", 500), ("b", 200), ("c", 300))]
    assert chosen(loads, policy=settings(policy)) == "b"


def test_one_with_room_before_a_freer_one_without_but_not_as_published() -> None:
    freer, roomier = instance("a", used=940, running=1), instance("b", used=500, running=100)
    assert dispatch_freeness(freer) > dispatch_freeness(roomier)
    assert chosen([freer, roomier], demand=100) == "b"
    assert chosen([freer, roomier], demand=50) == "a"
    assert chosen([freer, roomier], demand=100, policy=settings("llumnix")) == "a"


def test_cached_prefixes_are_room() -> None:
    assert instance("a", cached=900).room == 1000


def test_what_moves_in_is_no_room() -> None:
    assert instance("a", used=100, moving_in=300).room == 600


def test_the_batch_s_growth_needs_room_where_the_settings_say_so() -> None:
    careful = settings(dispatch={"margin_steps": 20})
    tight, roomy = instance("a", used=500, running=24), instance("b", used=850, running=1)
    assert fits(tight, 100, MESHIFT.dispatch)
    assert not fits(tight, 100, careful.dispatch)
    assert chosen([tight, roomy], 100, policy=careful) == "b"
    assert chosen([instance("a")], 990, policy=careful) == "a", "an idle instance takes whatever it can hold"


def test_a_negative_one_takes_it_only_when_all_are() -> None:
    published = settings("llumnix")
    a, b = instance("a", used=900, running=1, queued_demand=200), instance("b", used=900, running=1, queued_demand=150)
    assert chosen([a, b], 50, policy=published) == "b"
    assert chosen([a, instance("b", used=999, running=1)], 50, policy=published) == "b"
    for policy in (published, MESHIFT):
        kept_free = instance("a", used=100, running=1, headroom=950)
        assert chosen([kept_free, instance("b", used=900, running=30)], 50, policy=policy) == "b"
        assert chosen([kept_free, instance("b", used=100, running=1, headroom=970)], 50, policy=policy) == "a"


def test_priorities_count_only_where_the_policy_sees_them() -> None:
    loads = [instance("a", used=100, running=1, headroom=950), instance("b", used=900, running=10)]
    assert chosen(loads, 10, policy=settings("llumnix")) == "b"
    assert chosen(loads, 10, policy=settings("llumnix-base")) == "a"


@pytest.mark.parametrize("policy", POLICIES)
def test_ties_go_round_robin(policy: PolicyName) -> None:
    idle = [instance(name) for name in "abc"]
    assert [chosen(idle, turn=turn, policy=settings(policy)) for turn in range(4)] == ["a", "b", "c", "a"]


def test_round_robin_looks_at_nothing() -> None:
    loads = [instance("a", used=1000, running=9, queued_demand=500), instance("b")]
    assert [chosen(loads, turn=turn, policy=settings("round-robin")) for turn in range(3)] == ["a", "b", "a"]


def test_least_memory_load_counts_the_queue() -> None:
    loads = [instance("a", used=400, running=1, queued_demand=300), instance("b", used=600, running=50)]
    assert chosen(loads, policy=settings("infaas++")) == "b"
    assert chosen(loads, policy=settings("llumnix")) == "a"


def test_a_prompt_that_fits_nowhere_waits_where_most_is_free_and_nobody_waits() -> None:
    full = [instance("a", used=900, running=5), instance("b", used=800, running=5)]
    assert chosen(full, 300) == "b"
    one_waits = [full[0], instance("b", used=800, running=5, waiting=1, queued_demand=300, head_demand=300)]
    assert chosen(one_waits, 300) == "a"
    charged = [full[0], instance("b", used=800, running=5, charged=(300, 1))]
    assert chosen(charged, 300) == "a", "one on its way that must wait counts as waiting"


def test_a_prompt_goes_to_no_engine_that_admits_nothing_while_another_does() -> None:
    full = instance("a", used=100, running=1, batch_full=True)
    assert chosen([full, instance("b", used=700, running=5)], 100) == "b"
    assert chosen([full, instance("b", used=990, running=5)], 100) == "a", "it is next there at least"
    assert chosen([full, instance("b", used=700, running=5)], 100, policy=settings("llumnix")) == "a"


def test_further_ones_wait_at_the_scheduler_but_smaller_ones_pass() -> None:
    waits: dict[str, Any] = {"waiting": 1, "queued_demand": 300, "head_demand": 300}
    loads = [instance("a", used=900, running=5, **waits), instance("b", used=600, running=5)]
    decision = choose_instance(loads, 450, 0, MESHIFT)
    assert decision is not None
    assert decision.owner == Owner("b", 1)
    loads[1] = instance("b", used=600, running=5, charged=(450, 1))
    held = choose_instance(loads, 450, 0, MESHIFT)
    assert held is not None
    assert held.owner is None
    assert not held.fits
    assert "fits on none of 2" in held.reason
    assert chosen([*loads, instance("c", used=940, running=5)], 50) == "c"


def test_few_instances_have_queues_and_the_others_stay_open_for_what_fits() -> None:
    waits: dict[str, Any] = {"waiting": 1, "queued_demand": 300, "head_demand": 300}
    loads = [instance("a", used=900, running=5, **waits), *(instance(name, used=700, running=5) for name in "bcd")]
    half, quarter = (settings(dispatch={"margin_steps": 0, "queues_share": share}) for share in (0.5, 0.25))
    assert chosen(loads, 400, policy=half) == "b"
    assert chosen(loads, 400, policy=quarter) is None
    assert chosen(loads, 300, policy=quarter) == "b"
    assert chosen([instance("a", used=700, running=5)], 400, policy=quarter) == "a", "at one at least"
    decision = choose_instance(loads, 400, 0, quarter, may_wait=False)
    assert decision is not None
    assert decision.owner == Owner("b", 1)


def test_what_has_waited_long_may_wait_at_any_instance() -> None:
    waits: dict[str, Any] = {"waiting": 1, "queued_demand": 300, "head_demand": 300}
    loads = [instance("a", used=900, running=5, **waits), *(instance(name, used=700, running=5) for name in "bcd")]
    made = settings(dispatch={"margin_steps": 0, "queues_share": 0.25, "patience_s": 20})

    def after(waited_s: float, observed: list[InstanceObservation]) -> str | None:
        decision = choose_instance(observed, 400, 0, made, waited_s=waited_s)
        assert decision is not None
        assert not decision.fits
        return None if decision.owner is None else decision.owner.instance_id

    assert after(19.9, loads) is None
    assert after(20.0, loads) == "b"
    full = [instance(name, used=900, running=5, **waits) for name in "abcd"]
    assert after(500.0, full) is None, "enough wait everywhere"


def test_a_frontend_that_can_not_wait_always_gets_an_owner() -> None:
    waits: dict[str, Any] = {"waiting": 1, "queued_demand": 300, "head_demand": 300}
    loads = [instance("a", used=900, running=5, **waits), instance("b", used=800, running=5, **waits)]
    decision = choose_instance(loads, 450, 0, MESHIFT, may_wait=False)
    assert decision is not None
    assert decision.owner == Owner("b", 1)
    assert chosen(loads, 450, policy=settings(dispatch={"hold": False, "margin_steps": 0})) == "b"


@hypothesis.settings(deadline=None)
@given(instances(), st.integers(1, 1000), st.integers(0, 50), st.sampled_from(POLICIES))
def test_whatever_the_loads(loads: list[InstanceObservation], demand: int, turn: int, policy: PolicyName) -> None:
    policy_settings = settings(policy)
    decision = choose_instance(loads, demand, turn, policy_settings)
    assert decision is not None
    assert decision == choose_instance(loads, demand, turn, policy_settings)
    by_owner = {item.owner: item for item in loads}
    fitting = [item for item in loads if fits(item, demand, policy_settings.dispatch)]
    if decision.owner is None:
        assert policy == "meshift"
        assert not fitting
        assert sum(item.waiting > 0 for item in loads) >= policy_settings.dispatch.queues_of(len(loads))
    elif policy == "meshift" and fitting:
        assert by_owner[decision.owner] in fitting
    elif policy in ("llumnix", "llumnix-base"):
        headroom = policy == "llumnix"
        best = dispatch_freeness(by_owner[decision.owner], headroom)
        assert best == max(dispatch_freeness(item, headroom) for item in loads)
    elif policy == "infaas++":
        assert memory_load(by_owner[decision.owner]) == min(map(memory_load, loads))
    explanation = decision.explain()
    assert len(explanation.alternatives) == len(loads)
    taken = [item.name for item in explanation.alternatives if not item.rejected]
    assert taken == ([str(decision.owner)] if decision.owner is not None else [])


def test_a_decision_explains_itself() -> None:
    decision = choose_instance([instance("a", used=990, running=3), instance("b")], 50, 7, MESHIFT)
    assert decision is not None
    explanation = decision.explain()
    assert explanation.decision == "b#1"
    assert explanation.inputs == {"policy": "meshift", "demand": 50, "turn": 7}
    assert explanation.alternatives[0].rejected == "room for 10 of 50 tokens"
    assert explanation.alternatives[0].figures["room"] == 10


def test_charges_keep_a_burst_from_herding() -> None:
    charges = Charges()
    loads = [load_report("a"), load_report("b")]
    places = []
    for turn in range(6):
        candidates = [InstanceObservation(report, *charges.charged(report.owner)) for report in loads]
        decision = choose_instance(candidates, 100, turn, MESHIFT)
        assert decision is not None
        assert decision.owner is not None
        charges.charge(decision.owner, 100)
        places.append(decision.owner.instance_id)
    assert sorted(places) == ["a"] * 3 + ["b"] * 3


def test_a_burst_does_not_go_past_an_instance_whose_report_is_old() -> None:
    charges = Charges()
    loads = [load_report("a", used=100, free=900, running=4), load_report("b")]
    places = []
    for turn in range(8):
        candidates = [InstanceObservation(report, *charges.charged(report.owner)) for report in loads]
        decision = choose_instance(candidates, 20, turn, MESHIFT)
        assert decision is not None
        assert decision.owner is not None
        charges.charge(decision.owner, 20)
        places.append(decision.owner.instance_id)
    assert places.count("a") >= 2


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


def _classed(name: str, used: int, running: int, *loads: tuple[int, int]) -> InstanceObservation:
    """With classes of (execution, headroom)."""
    classes = tuple(
        ClassLoad(name=f"c{execution}", execution=execution, running=1, used=100, headroom=headroom)
        for execution, headroom in loads
    )
    return instance(name, used=used, running=running, classes=classes, headroom=sum(kept for _, kept in loads))


def test_headroom_is_kept_from_lower_classes_only() -> None:
    item = _classed("a", 300, 3, (2, 900), (1, 400))
    seen = {execution: seen_by(execution, [item])[0].headroom for execution in (0, 1, 2, 3)}
    assert seen == {0: 1300, 1: 900, 2: 0, 3: 0}
    greatest = instance("a", used=300, running=3, classes=item.report.classes, headroom=900)
    assert seen_by(1, [greatest])[0].headroom == 900, "of an instance that keeps the greatest headroom, not the sum"


def test_a_prompt_of_high_priority_goes_where_it_decodes_fastest_beside_its_own_kind() -> None:
    cleared, crowded, large = (
        _classed("a", 200, 2, (1, 900)),
        instance("b", used=400, running=2),
        instance("c", used=600, running=1),
    )
    loads = [cleared, crowded, large]
    assert chosen(loads) == "c", "none of normal priority where headroom is kept"
    assert chosen(seen_by(1, loads)) == "a"
    assert chosen(seen_by(1, [_classed("a", 200, 2, (2, 900)), crowded, large])) == "b", "kept for a higher class"
    decision = choose_instance(seen_by(1, loads), 10, 0, MESHIFT)
    assert decision is not None
    assert decision.reason == "load of 520 tokens for its class, least of 3", "two requests count as 160 tokens each"
    fewer = instance("d", used=450, running=1)
    assert chosen(seen_by(1, [crowded, fewer])) == "d", "a request more makes steps longer than 50 tokens do"


@given(instances(), st.integers(1, 1000), st.integers(0, 3))
def test_priority_never_changes_whether_a_prompt_fits(
    loads: list[InstanceObservation], demand: int, execution: int
) -> None:
    plain, seen = (
        choose_instance(loads, demand, 0, MESHIFT),
        choose_instance(seen_by(execution, loads), demand, 0, MESHIFT),
    )
    assert plain is not None
    assert seen is not None
    assert (plain.fits, plain.owner is None) == (seen.fits, seen.owner is None)
