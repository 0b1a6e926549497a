"""The planner: maps, budgets, refusals. Properties over any aligned change."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshift.schemas.layouts import LayoutFacts, LayoutFlags, LayoutRefusal, Split, StageFacts, counts_of, split_of
from meshift.services.coordinator import planner
from tests.support.examples import examples

FLAGS = LayoutFlags()
STAGE = StageFacts(budget=None, reserve=0, layer_weights=1000, block=100)


def facts_of(
    layers: tuple[int, ...],
    *,
    k: int = 4,
    stages: tuple[StageFacts, ...] | None = None,
    capacity: int = 1600,
    capacity_max: int = 1600,
    used: int = 0,
) -> LayoutFacts:
    return LayoutFacts(
        split=split_of(layers),
        epoch=3,
        layers_per_group=k,
        page_tokens=16,
        capacity=capacity,
        capacity_max=capacity_max,
        used=used,
        stages=stages or tuple(STAGE for _ in layers),
    )


@st.composite
def changes(draw: st.DrawFn) -> tuple[LayoutFacts, Split]:
    """Any aligned change: k, layers (the last group may hold fewer), stages, empty ones too."""
    k = draw(st.integers(1, 5))
    layers = draw(st.integers(1, 33))
    count = draw(st.integers(1, 6))
    bound = st.integers(0, -(-layers // k)).map(lambda group: min(layers, group * k))

    def split() -> Split:
        bounds = sorted(draw(st.lists(bound, min_size=count - 1, max_size=count - 1)))
        return tuple(pairwise((0, *bounds, layers)))

    stage = st.builds(
        StageFacts,
        budget=st.none() | st.integers(0, 100_000),
        reserve=st.integers(0, 1000),
        layer_weights=st.integers(0, 3000),
        block=st.integers(1, 500),
    )
    capacity = draw(st.integers(1, 200)) * 16
    facts = LayoutFacts(
        split=split(),
        epoch=draw(st.integers(0, 5)),
        layers_per_group=k,
        page_tokens=16,
        capacity=capacity,
        capacity_max=capacity + draw(st.integers(0, 50)) * 16,
        used=draw(st.integers(0, capacity)),
        stages=tuple(draw(stage) for _ in range(count)),
    )
    return facts, split()


@given(changes())
@settings(max_examples=examples(300))
def test_the_maps_of_any_aligned_change(change: tuple[LayoutFacts, Split]) -> None:
    facts, target = change
    plan = planner.plan_change(facts, target, FLAGS)
    if target == facts.split:
        assert plan.refusal is LayoutRefusal.UNCHANGED
        return
    assert plan.refusal in (None, LayoutRefusal.NO_MEMORY)
    for stage, (begin, end) in enumerate(facts.split):
        held = set(range(begin, end)) | set(plan.added[stage])
        assert not set(plan.added[stage]) & set(range(begin, end))
        assert sorted(held - set(plan.deleted[stage])) == list(range(*target[stage]))
    arriving = [layer for move in plan.moved for layer in range(*move.layers)]
    assert sorted(arriving) == sorted(layer for new in plan.added for layer in new), "each comes once, from one stage"
    for move in plan.moved:
        assert set(range(*move.layers)) <= set(range(*facts.split[move.source]))
        assert set(range(*move.layers)) <= set(plan.added[move.destination])


@given(changes())
@settings(max_examples=examples(300))
def test_no_stage_ever_holds_more_than_it_has(change: tuple[LayoutFacts, Split]) -> None:
    facts, target = change
    plan = planner.plan_change(facts, target, FLAGS)
    if not plan.feasible:
        return
    assert plan.used <= plan.capacity_during <= plan.capacity
    assert plan.capacity_during <= plan.capacity_after <= facts.capacity_max or plan.capacity_during == plan.capacity
    for stage, memory in enumerate(facts.stages):
        if memory.budget is None:
            continue
        for ranges, capacity in (
            ((facts.split[stage], target[stage]), plan.capacity_during),
            ((target[stage],), plan.capacity_after),
        ):
            layers = len({layer for span in ranges for layer in range(*span)})
            groups = planner.groups_of(ranges, facts.layers_per_group)
            need = memory.reserve + layers * memory.layer_weights + groups * memory.block * capacity // 16
            assert need <= memory.budget


@given(changes())
@settings(max_examples=examples(200))
def test_budgets_are_the_greatest_that_fit(change: tuple[LayoutFacts, Split]) -> None:
    """One page more than B_new doesn't fit, unless the operator's bound is what holds it."""
    facts, target = change
    plan = planner.plan_change(facts, target, FLAGS)
    if not plan.feasible or plan.capacity_after == facts.capacity_max // 16 * 16 or plan.capacity_after % 16:
        return
    more = plan.capacity_after // 16 + 1
    assert any(
        memory.budget is not None
        and memory.reserve
        + len(range(*target[stage])) * memory.layer_weights
        + planner.groups_of([target[stage]], facts.layers_per_group) * memory.block * more
        > memory.budget
        for stage, memory in enumerate(facts.stages)
    )


@given(st.integers(2, 6), st.integers(1, 40), st.data())
@settings(max_examples=examples(200))
def test_an_unaligned_target_names_aligned_ones(k: int, layers: int, data: st.DataObject) -> None:
    bounds = sorted(data.draw(st.lists(st.integers(0, layers), min_size=1, max_size=4)))
    target = tuple(pairwise((0, *bounds, layers)))
    current = split_of((layers, *([0] * len(bounds))))
    plan = planner.plan_change(facts_of(counts_of(current), k=k), target, FLAGS)
    if all(bound % k == 0 or bound == layers for bound in bounds):
        assert plan.refusal in (None, LayoutRefusal.UNCHANGED)
        return
    assert plan.refusal is LayoutRefusal.UNALIGNED
    assert 1 <= len(plan.nearest) <= 3
    for counts in plan.nearest:
        assert "/".join(map(str, counts)) in plan.reason
        again = planner.plan_change(facts_of(counts_of(current), k=k), split_of(counts), FLAGS)
        assert again.refusal in (None, LayoutRefusal.UNCHANGED)


def test_grow_from_one_stage_to_all_and_back() -> None:
    one, all_of_them = (30, 0, 0), (12, 12, 6)
    grow = planner.plan_change(facts_of(one), split_of(all_of_them), FLAGS)
    assert [(move.source, move.destination, move.layers) for move in grow.moved] == [(0, 1, (12, 24)), (0, 2, (24, 30))]
    assert grow.deleted == (tuple(range(12, 30)), (), ())
    shrink = planner.plan_change(facts_of(all_of_them), split_of(one), FLAGS)
    assert [(move.source, move.destination, move.layers) for move in shrink.moved] == [
        (1, 0, (12, 24)),
        (2, 0, (24, 30)),
    ]
    assert shrink.deleted == ((), tuple(range(12, 24)), tuple(range(24, 30)))


@pytest.mark.parametrize(
    ("target", "refusal", "words"),
    [
        (split_of((16, 14, 0)), LayoutRefusal.INVALID, "3 stages"),
        (split_of((16, 16)), LayoutRefusal.INVALID, "32 layers in all, and the model has 30"),
        (((0, 16), (20, 30)), LayoutRefusal.INVALID, "follow one another"),
        (((0, 16), (16, 12)), LayoutRefusal.INVALID, "follow one another"),
        (split_of((16, 14)), LayoutRefusal.UNCHANGED, "its layout"),
        (split_of((15, 15)), LayoutRefusal.UNALIGNED, "16/14 or 12/18"),
    ],
)
def test_what_is_no_target(target: Split, refusal: LayoutRefusal, words: str) -> None:
    plan = planner.plan_change(facts_of((16, 14)), target, FLAGS)
    assert plan.refusal is refusal
    assert words in plan.reason
    assert not any(plan.added)


def test_what_memory_forbids() -> None:
    """Two groups of four layers on stage 0: 8,000 of weights; a page takes 200 of it, 100 more for each group."""
    tight = StageFacts(budget=14_000, reserve=1000, layer_weights=1000, block=100)
    facts = facts_of((8, 8), stages=(tight, STAGE), capacity=400, capacity_max=800, used=160)
    plan = planner.plan_change(facts, split_of((12, 4)), FLAGS)
    assert (plan.capacity_during, plan.capacity_after) == (3 * 16, 3 * 16)
    assert plan.refusal is LayoutRefusal.NO_MEMORY
    assert "48 tokens, and requests hold 160" in plan.reason
    assert planner.plan_change(facts.model_copy(update={"used": 48}), split_of((12, 4)), FLAGS).feasible
    kept = planner.plan_change(facts.model_copy(update={"used": 0}), split_of((12, 4)), LayoutFlags(no_resize=True))
    assert kept.refusal is LayoutRefusal.NO_MEMORY
    assert "resizing is left out" in kept.reason
    none = planner.plan_change(facts, split_of((16, 0)), FLAGS)
    assert none.refusal is LayoutRefusal.NO_MEMORY
    assert "some stage has no room" in none.reason


def test_a_stage_that_gives_layers_away_lets_capacity_grow() -> None:
    first = StageFacts(budget=20_000, reserve=0, layer_weights=1000, block=100)
    facts = facts_of((16, 0), stages=(first, STAGE), capacity=160, capacity_max=10_000)
    plan = planner.plan_change(facts, split_of((8, 8)), FLAGS)
    assert (plan.capacity_during, plan.capacity_after) == (160, (20_000 - 8000) // 200 * 16)
    assert planner.plan_change(facts, split_of((8, 8)), LayoutFlags(no_resize=True)).capacity_after == 160
    assert any("capacity 160 tokens, 960 afterwards" in line for line in plan.words)


def test_the_plan_in_words() -> None:
    plan = planner.plan_change(facts_of((16, 14), used=160), split_of((20, 10)), LayoutFlags(no_patch=True))
    assert plan.words[0] == "16/14 -> 20/10 layers, epoch 3"
    assert plan.words[1] == "layers 16-19 go from stage 1 to stage 0"
    assert plan.kv_bytes == 10 * 100
    assert plan.weights_bytes == 4 * 1000
    assert any("while it is stopped" in line for line in plan.words)
