"""How much headroom counts over a cluster, and what it makes of dispatches and moves. Instances have 1,000 tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshift.schemas.instances import ClassLoad
from meshift.services.scheduler.decisions import DecisionLog
from meshift.services.scheduler.dispatching import seen_by
from meshift.services.scheduler.headroom import STALLED_S, Headrooms
from meshift.services.scheduler.policy.dispatch import choose_instance, fits, is_last
from meshift.services.scheduler.policy.freeness import migration_freeness, settled_load
from meshift.services.scheduler.policy.headroom import HeadroomPlan, headroom_budget, plan_headroom
from meshift.services.scheduler.policy.observation import InstanceObservation
from meshift.services.scheduler.policy.pairing import pair_instances
from meshift.services.scheduler.policy.settings import HeadroomSettings, PolicySettings
from tests.support.reports import load_report
from tests.unit.scheduler.kit import CAPACITY, instance, instances, settings

TARGET = 100
BOUND = HeadroomSettings(others_slower_max=0.05, full_step_times=3.0, request_tokens=0.0)
MESHIFT = settings(headroom=BOUND.model_dump(), dispatch={"margin_steps": 0})


def with_high(name: str, high: int, others: int = 0, running: int = 2) -> InstanceObservation:
    """One request of high priority that holds `high` tokens, and others."""
    load = ClassLoad(name="high", execution=1, running=1, used=high, headroom=CAPACITY - TARGET)
    return instance(name, used=high + others, running=running, classes=(load,), headroom=load.headroom)


def granted(loads: list[InstanceObservation], made: HeadroomSettings = BOUND) -> list[InstanceObservation]:
    plan = plan_headroom(loads, made)
    return [item._replace(granted=plan.granted.get(item.owner)) for item in loads]


def chosen(loads: list[InstanceObservation], demand: int = 10, execution: int = 0) -> str | None:
    decision = choose_instance(seen_by(execution, loads), demand, 0, MESHIFT)
    assert decision is not None
    return decision.owner and decision.owner.instance_id


def test_the_budget_in_numbers() -> None:
    loads = [with_high("a", 500), *(instance(name, used=500, running=5) for name in "bcdefghij")]
    load, others_load, budget = headroom_budget(loads, 0.05, 3.0)
    assert (load, others_load) == pytest.approx((0.5, 0.55)), (
        "a step of 1 + 2 * 0.5 times becomes 1 + 2 * 0.55: 5% more"
    )
    # 4,500 tokens at a load of 0.55 need 8,181 of the 9,500 that aren't the high request's.
    assert budget == 1318


def test_a_full_cluster_has_none_to_give_and_an_empty_one_all() -> None:
    full = [with_high("a", 1000), *(instance(name, used=1000, running=5) for name in "bcd")]
    assert headroom_budget(full, 0.05, 3.0) == (1.0, 1.0, 0)
    queued = [with_high("a", 500), instance("b", used=1000, running=5, waiting=3, head_demand=900, queued_demand=1500)]
    assert headroom_budget(queued, 0.05, 3.0)[2] == 0, "those that wait are to have room first"
    assert headroom_budget([instance("a"), instance("b")], 0.05, 3.0) == (0.0, 0.0, 2000)


def test_it_is_spent_where_most_is_protected_then_where_the_least_must_move_away() -> None:
    many = [with_high("a", 300, 100), with_high("b", 400), *(instance(f"c{n}", used=400, running=4) for n in range(16))]
    many.append(instance("d", used=300, running=4))
    plan = plan_headroom(many, BOUND)
    _, _, budget = headroom_budget(many, 0.05, 3.0)
    given_to = {owner.instance_id: tokens for owner, tokens in plan.granted.items()}
    assert (given_to["b"], given_to["a"]) == (900, 900)
    # Clearing b costs the others the 600 tokens that its high request doesn't hold, clearing a 700.
    assert given_to["d"] == min(900, budget - 600 - 700)
    assert given_to["c0"] == max(0, budget - 600 - 700 - 900)


def test_nothing_is_bounded_where_nobody_asks_or_no_bound_is_set() -> None:
    assert plan_headroom([instance("a", used=100, running=1)], BOUND).granted == {}
    assert plan_headroom([], BOUND).granted == {}
    unbound = HeadroomSettings(others_slower_max=None)
    assert plan_headroom([with_high("a", 500)], unbound).granted == {}
    assert with_high("a", 500)._replace(granted=None).kept == 900


def test_of_few_instances_none_is_cleared() -> None:
    """It would cost the others half of all memory: they give up a third of an instance that they don't use anyway."""
    two = granted([with_high("a", 100, 300), instance("b", used=400, running=4)])
    assert two[0].kept == 326
    assert migration_freeness(two[0]) > 0


def test_others_go_elsewhere_while_there_is_room_and_wait_rather_than_take_what_is_kept() -> None:
    loads = granted([with_high("a", 200), *(instance(f"b{n}", used=500, running=5) for n in range(15))])
    assert loads[0].kept == 900
    assert chosen(loads) == "b0", "a has more free"
    assert chosen(loads, 600) != "a", "of the 800 that it has free none are offered"
    assert chosen(loads, 600, execution=1) == "a"
    decision = choose_instance(loads, 10, 0, MESHIFT)
    assert decision is not None
    told = {item.name: item for item in decision.explain().alternatives}
    assert told[str(loads[0].owner)].rejected == "900 tokens are kept free for a class above"


def test_where_a_part_is_kept_what_is_left_is_the_last_that_others_take() -> None:
    part = with_high("a", 200)._replace(granted=300)
    assert (part.room, part.offered) == (800, 500)
    assert chosen([part, instance("b", used=700, running=7)]) == "b"
    assert chosen([part, instance("b", used=700, running=7)], 400) == "a"
    decision = choose_instance([part, instance("b", used=700, running=7)], 10, 0, MESHIFT)
    assert decision is not None
    told = {item.name: item.rejected for item in decision.explain().alternatives}
    assert told[str(part.owner)] == "kept for a class above"


def test_high_ones_share_an_instance_until_another_would_be_as_fast() -> None:
    shared = with_high("a", 80, 300)._replace(granted=900)
    cleared, plain = (
        instance("b", used=400, running=4)._replace(granted=900),
        instance("c", used=300)._replace(granted=0),
    )
    assert chosen([shared, cleared, plain], execution=1) == "a", "both settle at the target, and a holds less of others"
    crowded = with_high("a", 350, 300)._replace(granted=900)
    assert chosen([crowded, plain, cleared._replace(granted=0)], execution=1) == "c", "350 of its own are more than 300"
    assert chosen([crowded, plain, cleared], execution=1) == "b", "which would be cleared to 100"


def test_settled_loads_in_numbers() -> None:
    plain = instance("a", used=400, running=4)
    assert settled_load(plain, 10.0) == 440
    assert settled_load(with_high("a", 50, 350, running=5)._replace(granted=900), 0.0) == 100
    # Of 350 tokens in four requests 50 stay, which is four sevenths of a request.
    assert settled_load(with_high("a", 50, 350, running=5)._replace(granted=900), 70.0) == 100 + 70 * (1 + 4 / 7)
    assert settled_load(with_high("a", 200, 300)._replace(granted=900), 0.0) == 200
    assert settled_load(with_high("a", 50, 350)._replace(granted=0), 0.0) == 400


def test_a_high_prompt_avoids_an_engine_at_a_long_prompt_and_others_do_not() -> None:
    busy, other = instance("a", used=100, running=1), instance("b", used=300, running=1)
    loads = [busy._replace(stalled=True), other]
    assert chosen(loads, execution=1) == "b"
    assert chosen(loads) == "a"
    assert chosen([item._replace(stalled=True) for item in (busy, other)], execution=1) == "a"


def test_only_granted_headroom_moves_others_away_and_a_destination_keeps_its_own() -> None:
    made = MESHIFT.replaced({"migration": {"out_below": 3, "in_above": 30}})
    full = with_high("a", 100, 300, running=4)
    free = instance("b", used=100, running=2)
    (pair,) = pair_instances([full._replace(granted=900), free], made, 0.0, {}).pairs
    assert (pair.source.instance_id, pair.headroom_max) == ("a", 900)
    assert pair.tokens_wanted == 312, "100 + 300 + 900 - 1000, and 3 steps of 4 requests"
    assert pair_instances([full._replace(granted=300), free], made, 0.0, {}).pairs == ()
    short = instance("c", used=990, running=5)
    kept = with_high("a", 100, running=1)._replace(granted=600)
    (pair,) = pair_instances([kept, short], made, 0.0, {}).pairs
    assert (pair.destination.instance_id, pair.tokens_max) == ("a", 300), "of 900 free ones 600 are kept"


def test_it_explains_itself() -> None:
    loads = [with_high("a", 500), *(instance(name, used=500, running=5) for name in "bcdefghij")]
    told = plan_headroom(loads, BOUND).explain()
    assert told.decision == "900 tokens of headroom count"
    assert told.why == "others at a load of 0.550 instead of 0.500 leave 1318 tokens"
    assert told.inputs["others_slower_max"] == 0.05
    first, second, third, *_ = told.alternatives
    assert (first.figures["granted"], first.rejected) == (900, "")
    assert second.figures["granted"] == 818
    assert third.rejected == "the budget is spent where more is protected"
    assert HeadroomPlan().explain().decision == "all headroom counts"


@st.composite
def clusters(draw: st.DrawFn) -> list[InstanceObservation]:
    made = []
    for item in draw(instances(max_size=12)):
        high = draw(st.integers(0, item.report.used))
        load = ClassLoad(name="high", execution=1, running=1, used=high, headroom=CAPACITY - TARGET)
        asks = bool(item.report.running) and draw(st.booleans())
        report = item.report.model_copy(
            update={"classes": (load,) if asks else (), "headroom": load.headroom if asks else 0}
        )
        made.append(item._replace(report=report))
    return made


@given(clusters(), st.floats(0, 1), st.floats(1.1, 10))
def test_the_others_keep_what_they_need_for_the_load_that_they_may_have(
    loads: list[InstanceObservation], slower_max: float, full_step_times: float
) -> None:
    made = HeadroomSettings(others_slower_max=slower_max, full_step_times=full_step_times)
    plan = plan_headroom(loads, made)
    if not plan.budget:
        assert not any(plan.granted.values())
        return
    kept = [min(item.kept, CAPACITY - item.protected) for item in granted(loads, made)]
    assert sum(kept) <= plan.budget
    protected = sum(item.protected for item in loads)
    others = plan.load * CAPACITY * len(loads) - protected
    assert others <= plan.others_load * (CAPACITY * len(loads) - protected - sum(kept)) + 1e-6 * CAPACITY + 1
    assert plan.load <= plan.others_load <= max(1.0, plan.load)


@given(clusters(), st.integers(1, 1000), st.floats(0, 1))
def test_a_high_prompt_never_does_worse_than_without_priorities(
    loads: list[InstanceObservation], demand: int, slower_max: float
) -> None:
    """It has room wherever it would have some then, and among the instances that aren't last none settles lower."""
    made = MESHIFT.replaced({"headroom": {"others_slower_max": slower_max, "request_tokens": 50}})
    seen = seen_by(1, granted(loads, made.headroom))
    blind = [item._replace(granted=None) for item in loads]
    for mine, plain in zip(seen, blind, strict=True):
        assert fits(mine, demand, made.dispatch) == fits(plain, demand, made.dispatch)
        assert settled_load(mine, 50.0) <= settled_load(plain, 50.0)
    decision = choose_instance(seen, demand, 0, made)
    assert decision is not None
    open_ones = [item for item in seen if fits(item, demand, made.dispatch) and not is_last(item)]
    if open_ones:
        (taken,) = (item for item in seen if item.owner == decision.owner)
        assert settled_load(taken, 50.0) <= min(settled_load(item, 50.0) for item in open_ones) + 1e-6


def test_as_published_nothing_changes() -> None:
    headrooms = Headrooms(DecisionLog())
    loads = [with_high("a", 500), instance("b", used=500, running=5)]
    for item in loads:
        headrooms.on_report(item.report, 0.0)
    assert list(headrooms.plan(["m"], lambda _: loads, settings("llumnix"), 0.0)) == []
    assert headrooms.granted(loads[0].owner) is None


def test_plans_say_whose_headroom_changed_and_nobody_is_looked_at_while_nobody_asks() -> None:
    headrooms, made = Headrooms(DecisionLog()), PolicySettings()
    asks, plain = with_high("a", 500), instance("b", used=500, running=5)
    asked: list[str] = []

    def observe(model: str) -> list[InstanceObservation]:
        asked.append(model)
        return [asks, plain]

    headrooms.on_report(plain.report, 0.0)
    assert list(headrooms.plan(["m"], observe, made, 0.0)) == []
    assert asked == []
    headrooms.on_report(asks.report, 0.0)
    assert set(headrooms.plan(["m"], observe, made, 0.0)) == {asks.owner, plain.owner}
    assert headrooms.granted(asks.owner) is not None
    assert list(headrooms.plan(["m"], observe, made, 0.1)) == []
    unbound = made.replaced({"headroom": {"others_slower_max": None}})
    assert set(headrooms.plan(["m"], observe, unbound, 0.2)) == {asks.owner, plain.owner}
    assert headrooms.granted(asks.owner) is None
    headrooms.forget(asks.owner)
    assert list(headrooms.plan(["m"], observe, made, 0.3)) == []


def test_an_engine_that_ends_no_step_is_at_a_long_prompt() -> None:
    headrooms = Headrooms(DecisionLog())
    owner = load_report("a").owner

    def after(at_s: float, steps: int, running: int = 1) -> bool:
        headrooms.on_report(load_report("a", running=running, step_count=steps), at_s)
        return headrooms.is_stalled(owner)

    assert not after(0.0, 7)
    assert not after(STALLED_S / 2, 7), "a step may take so long"
    assert after(STALLED_S, 7)
    assert not after(0.2, 17), "20 ms a step"
    assert not after(0.4, 17, running=0), "nothing runs"
    assert not after(0.45, 17)
    assert after(0.5, 17)
    assert not after(0.6, 18), "its step took 200 ms"
    assert not after(0.8, 18), "so may the next"
    assert after(0.9, 18)
    headrooms.forget(owner)
    assert not headrooms.is_stalled(owner)
