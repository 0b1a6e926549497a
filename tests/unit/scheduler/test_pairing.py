"""Migration pairs, rounds of reports, explicit packing."""

import math
from typing import Any

import hypothesis
from hypothesis import given
from hypothesis import strategies as st

from meshift.schemas.identity import Owner
from meshift.services.scheduler.policy.defragment import fragmented_tokens, missing_room, pack
from meshift.services.scheduler.policy.dispatch import fits
from meshift.services.scheduler.policy.freeness import migration_freeness
from meshift.services.scheduler.policy.observation import InstanceObservation
from meshift.services.scheduler.policy.pairing import (
    PairingRounds,
    PairTimes,
    missing_tokens,
    pair_instances,
    requeue,
)
from meshift.services.scheduler.policy.settings import PolicyName, PolicySettings
from tests.unit.scheduler.kit import PLAIN, instance, instances, settings

MESHIFT = PLAIN


def pairs(
    loads: list[InstanceObservation],
    now_s: float = 0.0,
    paired: PairTimes | None = None,
    policy: PolicyName = "meshift",
) -> list[tuple[str, str]]:
    plan = pair_instances(loads, MESHIFT.model_copy(update={"policy": policy}), now_s, paired or {})
    return [(pair.source.instance_id, pair.destination.instance_id) for pair in plan.pairs]


def test_of_the_queue_only_the_head_counts() -> None:
    assert migration_freeness(instance(used=400, running=2, head_demand=100, queued_demand=500)) == 250


def test_an_instance_that_drains_has_minus_infinity() -> None:
    assert migration_freeness(instance(draining=True)) == -math.inf


def test_the_most_overloaded_gives_to_the_one_with_the_most_free_tokens() -> None:
    loads = [
        instance("a", used=990, running=10),
        instance("b", used=995, running=10, head_demand=100, waiting=1),
        instance("c", used=700, running=1),
        instance("d", used=500, running=15),
        instance("e", used=800, running=10),
    ]
    freeness = {item.owner.instance_id: migration_freeness(item) for item in loads}
    assert freeness["c"] > freeness["d"] > 30 > freeness["e"] > 3 > freeness["a"] > freeness["b"]
    assert pairs(loads) == [("b", "d"), ("a", "c")]


def test_a_pair_says_how_much_and_until_when() -> None:
    loads = [instance("a", used=990, running=10, head_demand=100, waiting=1), instance("b", used=100, running=1)]
    (pair,) = pair_instances(loads, MESHIFT, 7.0, {}).pairs
    assert (pair.tokens_max, pair.until_freeness) == (900, 3.0)
    assert pair.tokens_wanted == missing_tokens(loads[0], MESHIFT) == 3 * 10 - (1000 - 990 - 100)
    assert pair.expires_s == 7.0 + MESHIFT.migration.pair_ttl_s


def test_a_destination_without_free_tokens_takes_nothing() -> None:
    source = instance("a", used=1000, running=10)
    assert pairs([source, instance("b", used=500, running=1, reserved=500)]) == []
    assert pairs([source, instance("b", used=100, running=1, moving_in=400, charged=(500, 1))]) == []


def test_a_source_without_running_requests_has_nothing_to_give() -> None:
    assert pairs([instance("a", head_demand=1200, waiting=1), instance("b")]) == []


def test_a_draining_instance_gives_and_never_takes() -> None:
    drains = instance("a", used=10, running=1, draining=True)
    assert pairs([drains, instance("b")]) == [("a", "b")]
    assert pairs([instance("b", used=1000, running=9), instance("a", draining=True)]) == []
    (pair,) = pair_instances([drains, instance("b")], MESHIFT, 0.0, {}).pairs
    assert pair.tokens_wanted == 10


def test_a_pair_is_not_turned_round_at_once() -> None:
    loads = [instance("a", used=1000, running=10), instance("b")]
    paired = {(Owner("b", 1), Owner("a", 1)): 10.0}
    assert pairs(loads, 12.0, paired) == []
    assert pairs([*loads, instance("c", used=500)], 12.0, paired) == [("a", "c")]
    assert pairs(loads, 15.0, paired) == [("a", "b")]
    assert pairs([instance("a", used=9, running=1, draining=True), instance("b")], 12.0, paired) == [("a", "b")]


def test_headroom_makes_a_source_only_where_priorities_count() -> None:
    loads = [instance("a", used=300, running=2, headroom=900), instance("b")]
    assert pairs(loads) == [("a", "b")]
    assert pairs(loads, policy="llumnix-base") == []


def test_a_plan_explains_itself() -> None:
    loads = [
        instance("a", used=999, running=10),
        instance("b"),
        instance("c", used=998, running=10),
        instance("d", used=900, running=10),
    ]
    explanation = pair_instances(loads, MESHIFT, 0.0, {}).explain()
    assert explanation.decision == "a#1 to b#1"
    assert [item.rejected for item in explanation.alternatives] == [
        "",
        "",
        "no destination left",
        "neither overloaded nor free",
    ]
    assert explanation.inputs["out_below"] == 3.0


@hypothesis.settings(deadline=None)
@given(instances(), st.sampled_from(["pack", "plain", "requeue"]))
def test_whatever_the_loads(loads: list[InstanceObservation], way: str) -> None:
    chosen = settings() if way == "requeue" else MESHIFT
    plan = pack(loads, chosen, 0.0) if way == "pack" else pair_instances(loads, chosen, 0.0, {})
    by_owner = {item.owner: item for item in loads}
    named = [owner for pair in plan.pairs for owner in (pair.source, pair.destination)]
    assert len(named) == len(set(named)), "an instance is in one pair at most"
    for pair in plan.pairs:
        source, destination = by_owner[pair.source], by_owner[pair.destination]
        assert not destination.is_draining
        assert 0 < pair.tokens_max <= destination.free
        assert 0 <= pair.tokens_wanted <= pair.tokens_max
        if pair.waiting:
            assert source.report.head_demand > source.free
            assert source.report.head_demand <= destination.room == pair.tokens_max
        else:
            assert source.report.running
        if way != "pack" and not pair.waiting:
            assert migration_freeness(source) < chosen.out_below < chosen.in_above < migration_freeness(destination)
    assert len(plan.explain().alternatives) == len(loads)


def test_what_waits_in_a_full_instance_goes_where_it_fits() -> None:
    waits: dict[str, Any] = {"waiting": 2, "head_demand": 300, "queued_demand": 500}
    full = instance("a", used=900, running=5, **waits)
    loads = [
        full,
        instance("b", used=600, running=4),
        instance("c", used=640, running=1),
        instance("d", used=750, running=1),
    ]
    (pair,) = requeue(loads, MESHIFT, 5.0)
    assert (pair.source, pair.destination) == (Owner("a", 1), Owner("c", 1)), "the freest of those where it fits"
    assert (pair.waiting, pair.tokens_max, pair.tokens_wanted) == (True, 360, 300)
    careful = settings(dispatch={"margin_steps": 31})
    assert [pair.tokens_wanted for pair in requeue(loads, careful, 5.0)] == [200], "its batch could not grow there"
    assert requeue([instance("a", used=700, running=5, **waits), *loads[1:]], MESHIFT, 5.0) == [], "it fits where it is"
    queued = instance("b", running=4, waiting=1, head_demand=10, queued_demand=10)
    assert requeue([full, queued], MESHIFT, 5.0) == [], "others wait there"


def test_what_waits_at_an_engine_that_admits_nothing_goes_whatever_is_free_there() -> None:
    """And not to one that admits nothing either."""
    waits: dict[str, Any] = {"waiting": 1, "head_demand": 50, "queued_demand": 50}
    full = instance("a", used=300, running=3, batch_full=True, **waits)
    idle, busy = instance("b", used=100, running=1), instance("c", used=50, running=1, batch_full=True)
    (pair,) = requeue([full, idle, busy], MESHIFT, 5.0)
    assert (pair.source, pair.destination, pair.tokens_wanted) == (Owner("a", 1), Owner("b", 1), 50)
    assert requeue([full, busy], MESHIFT, 5.0) == []
    assert requeue([instance("a", used=300, running=3, batch_full=True), idle], MESHIFT, 5.0) == [], "nobody waits"


def test_a_source_whose_head_can_go_gives_no_running_request() -> None:
    loads = [
        instance("a", used=980, running=5, waiting=1, head_demand=300, queued_demand=300),
        instance("b", used=100, running=1),
        instance("c", used=400, running=1),
    ]
    plan = pair_instances(loads, settings(), 0.0, {})
    assert [(pair.source.instance_id, pair.waiting) for pair in plan.pairs] == [("a", True)]
    assert [pair.waiting for pair in pair_instances(loads, settings("llumnix"), 0.0, {}).pairs] == [False]
    off = settings(migration={"requeue": False})
    assert [pair.waiting for pair in pair_instances(loads, off, 0.0, {}).pairs] == [False]


def test_a_round_is_complete_when_all_have_reported() -> None:
    rounds, (a, b, c) = PairingRounds(), (Owner(name, 1) for name in "abc")
    assert [rounds.on_report(owner, 3) for owner in (a, b, c)] == [False, False, True]
    assert rounds.take() == {a, b, c}
    assert rounds.take() == frozenset(), "no decision is taken twice on the same report"
    assert rounds.on_report(a, 3) is False
    assert rounds.on_report(a, 3) is True, "one that is late doesn't hold the others up"
    assert rounds.take() == {a}
    rounds.on_report(b, 3)
    rounds.forget(b)
    assert rounds.take() == frozenset()


def test_packing_helps_the_head_that_lacks_least_and_only_where_the_cluster_has_room() -> None:
    far = instance("a", used=900, running=5, waiting=1, head_demand=400, queued_demand=400)
    near = instance("b", used=900, running=5, waiting=1, head_demand=150, queued_demand=150)
    assert (missing_room(far), missing_room(near)) == (300, 50)
    plan = pack([far, near, instance("c", used=850, running=5)], MESHIFT, 0.0)
    (pair,) = plan.pairs
    assert (pair.source, pair.destination, pair.tokens_wanted) == (Owner("b", 1), Owner("c", 1), 50)
    assert pack([far, instance("c", used=750, running=5)], MESHIFT, 0.0).pairs == ()
    assert len(pack([far, near, instance("c"), instance("d", used=600)], MESHIFT, 0.0).pairs) == 2


def test_fragmented_memory_is_free_and_scattered() -> None:
    blocked = instance("a", used=900, running=5, waiting=1, head_demand=300, queued_demand=900)
    assert fragmented_tokens([blocked, instance("b", used=900)]) == 0, "the cluster has no 300"
    assert fragmented_tokens([blocked, instance("b", used=700)]) == 300
    assert fragmented_tokens([blocked, blocked, instance("b", used=700)]) == 300
    assert fragmented_tokens([instance("a"), instance("b")]) == 0


def plainly_requeued(loads: list[InstanceObservation], chosen: PolicySettings) -> list[tuple[Owner, Owner]]:
    """The rule as it reads: whoever lacks most first, each to the freest open one where it fits."""
    blocked = [item for item in loads if item.report.waiting and item.report.head_demand > item.free]
    blocked.sort(key=lambda item: (not item.is_draining, item.free - item.report.head_demand, item.owner))
    left = [item for item in loads if not item.is_draining and not item.report.waiting]
    result = []
    for source in blocked:
        able = [item for item in left if fits(item, source.report.head_demand, chosen.dispatch)]
        if able:
            best = max(able, key=lambda item: (migration_freeness(item), item.owner))
            left.remove(best)
            result.append((source.owner, best.owner))
    return result


@hypothesis.settings(deadline=None)
@given(instances(max_size=8), st.sampled_from([0.0, 5.0]))
def test_heads_go_to_the_freest_that_holds_them(loads: list[InstanceObservation], margin: float) -> None:
    chosen = settings(dispatch={"margin_steps": margin})
    pairs = requeue(loads, chosen, 0.0)
    plain = plainly_requeued(loads, chosen)
    assert [(pair.source, pair.destination) for pair in pairs[: len(plain)]] == plain
    # What follows are those behind heads that fit nowhere.
    by_owner = {item.owner: item for item in loads}
    for pair in pairs[len(plain) :]:
        assert by_owner[pair.source].report.waiting > 1
        assert 1 <= pair.tokens_wanted <= pair.tokens_max <= by_owner[pair.destination].room
    named = [owner for pair in pairs for owner in (pair.source, pair.destination)]
    assert len(named) == len(set(named))


def test_what_a_blocked_head_blocks_goes_where_it_fits() -> None:
    chosen = settings(dispatch={"margin_steps": 0})
    waits: dict[str, Any] = {"waiting": 3, "head_demand": 600, "queued_demand": 700}
    loads = [instance("a", used=900, running=5, **waits), instance("b", used=800, running=5)]
    (pair,) = requeue(loads, chosen, 0.0)
    assert (pair.source.instance_id, pair.destination.instance_id, pair.waiting) == ("a", "b", True)
    assert (pair.tokens_max, pair.tokens_wanted) == (200, 50)
    alone = instance("a", used=900, running=5, waiting=1, head_demand=600, queued_demand=600)
    assert requeue([alone, loads[1]], chosen, 0.0) == []
    assert requeue([loads[0], instance("b", used=960, running=5)], chosen, 0.0) == []


def test_a_head_may_come_to_count_gradually() -> None:
    head: dict[str, Any] = {"waiting": 1, "head_demand": 400, "queued_demand": 400}
    blocked = instance("a", used=900, running=10, **head)
    since = [blocked._replace(blocked_s=seconds) for seconds in (0.0, 2.5, 5.0, 60.0)]
    assert [migration_freeness(item, inflate_over_s=5.0) for item in since] == [10, -10, -30, -30]
    assert [migration_freeness(item) for item in since] == [-30] * 4, "at once, as published"
    gradual = settings(dispatch={"margin_steps": 0}, migration={"inflate_over_s": 5.0, "in_above": 30, "out_below": 3})
    assert [len(pair_instances([item, instance("b", used=650)], gradual, 0.0, {}).pairs) for item in since] == [
        0,
        1,
        1,
        1,
    ]


@hypothesis.settings(deadline=None)
@given(instances(max_size=8), st.sets(st.tuples(st.integers(0, 7), st.integers(0, 7))))
def test_sources_take_the_roomiest_that_they_may(
    loads: list[InstanceObservation], before: set[tuple[int, int]]
) -> None:
    paired = {(Owner(f"i{giver}", 1), Owner(f"i{taker}", 1)): 1.0 for giver, taker in before}
    plan = pair_instances(loads, MESHIFT, 2.0, paired)
    taken: set[Owner] = set()
    for source in sorted(
        (item for item in loads if plan.freeness[item.owner] < MESHIFT.out_below and item.report.running),
        key=lambda item: (plan.freeness[item.owner], item.owner),
    ):
        able = [
            item
            for item in loads
            if plan.freeness[item.owner] > MESHIFT.in_above and item.free > 0 and item.owner not in taken
            if source.is_draining or (item.owner, source.owner) not in paired
        ]
        best = min(able, key=lambda item: (-item.free, item.owner), default=None)
        pair = next((pair for pair in plan.pairs if pair.source == source.owner), None)
        assert (None if pair is None else pair.destination) == (None if best is None else best.owner)
        taken |= {best.owner} if best is not None else set()
