"""Dispatch by index decides as the plain scan does, whatever changes in between."""

from collections.abc import Sequence

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshift.schemas.instances import ClassLoad
from meshift.services.scheduler.dispatching import DispatchIndexes, seen_by
from meshift.services.scheduler.policy.dispatch import DispatchDecision, choose_instance
from meshift.services.scheduler.policy.index import FEW, DispatchIndex
from meshift.services.scheduler.policy.observation import InstanceObservation
from meshift.services.scheduler.policy.ordered import Ordered
from meshift.services.scheduler.policy.settings import POLICIES, PolicyName
from meshift.services.scheduler.policy.snapshots import kept_observations
from tests.unit.scheduler.kit import instance, instances, settings

LOADS = tuple(
    ClassLoad(name=name, execution=execution, running=2, used=300, headroom=900)
    for name, execution in (("urgent", 2), ("high", 1))
)
MARGINS = st.sampled_from([0.0, 1.0, 2.5, 20.0])


def same(ours: DispatchDecision | None, plain: DispatchDecision | None) -> None:
    assert ours is not None
    assert plain is not None
    for name in ("owner", "reason", "fits", "demand", "turn", "settings"):
        assert getattr(ours, name) == getattr(plain, name), name
    assert list(ours.instances) == list(plain.instances)
    assert ours.explain() == plain.explain()


def _planned(draw: st.DrawFn, loads: list[InstanceObservation]) -> list[InstanceObservation]:
    """With headroom that is granted, and engines at long prompts."""
    grants, stalls = st.sampled_from([None, 0, 150, 400]), st.booleans()
    return [item._replace(granted=draw(grants), stalled=draw(stalls)) for item in loads]


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[InstanceObservation], list[tuple[list[InstanceObservation], int, bool]]]:
    """Instances, and steps: what changed, and the demand of the dispatch that follows."""
    first = _planned(draw, draw(instances(max_size=6)))
    steps = []
    for _ in range(draw(st.integers(1, 3))):
        others = _planned(draw, draw(instances(min_size=len(first), max_size=len(first))))
        changed = draw(st.lists(st.integers(0, len(first) - 1), max_size=len(first), unique=True))
        steps.append(([others[place] for place in changed], draw(st.integers(1, 1000)), draw(st.booleans())))
    return first, steps


@hypothesis.settings(deadline=None)
@given(
    histories(),
    st.integers(0, 50),
    st.sampled_from(POLICIES),
    MARGINS,
    st.booleans(),
    st.sampled_from([0.0, 0.125, 0.5, 1.0]),
    st.sampled_from([0, 0, 1, 2]),
)
def test_it_decides_as_the_plain_scan(
    history: tuple[list[InstanceObservation], list[tuple[list[InstanceObservation], int, bool]]],
    turn: int,
    policy: PolicyName,
    margin: float,
    hold: bool,
    share: float,
    execution: int,
) -> None:
    now, steps = history
    now = seen_by(execution, now)
    made = settings(policy, dispatch={"margin_steps": margin, "hold": hold, "queues_share": share})
    index = DispatchIndex(now, made)
    places = {item.owner: place for place, item in enumerate(now)}
    for others, demand, may_wait in steps:
        changed = seen_by(execution, others)
        index.update(changed)
        now = list(now)
        for item in changed:
            now[places[item.owner]] = item
        same(
            index.choose(demand, turn, may_wait=may_wait, waited_s=40.0 * (turn % 3)),
            choose_instance(now, demand, turn, made, may_wait=may_wait, waited_s=40.0 * (turn % 3)),
        )
        turn += 1


@pytest.mark.parametrize("policy", POLICIES)
def test_of_many(policy: PolicyName) -> None:
    """More than are looked at one by one, most of them alike."""
    loads = [instance(f"i{number:03}", used=100 * (number % 7), running=number % 7) for number in range(4 * FEW)]
    made = settings(policy)
    index = DispatchIndex(loads, made)
    for turn in range(0, 300, 37):
        for demand in (1, 150, 350, 480, 777, 1000):
            same(index.choose(demand, turn), choose_instance(loads, demand, turn, made))


def test_prompts_of_high_priority_have_an_index_of_their_own_for_each_class_and_no_more() -> None:
    by_name = {
        name: instance(name, used=300, running=2, classes=(load,)) for name, load in zip("ab", LOADS, strict=True)
    }
    owners = {item.owner: name for name, item in by_name.items()}
    indexes = DispatchIndexes(lambda model: list(by_name.values()), lambda owner: by_name[owners[owner]])
    made = settings()
    for turn, execution in enumerate((0, 1, 2, 3, 10**9, -5)):
        ours = indexes.choose("m", 100, turn, made, may_wait=True, execution=execution)
        level = min(max(execution, 0), 2)
        same(ours, choose_instance(seen_by(level, list(by_name.values())), 100, turn, made))
    by_name["a"] = instance("a", used=100, running=1)
    indexes.changed(by_name["a"].owner)
    ours = indexes.choose("m", 100, 9, made, may_wait=True, execution=10**9)
    same(ours, choose_instance(seen_by(2, list(by_name.values())), 100, 9, made))
    published = settings("llumnix")
    same(
        indexes.choose("m", 100, 9, published, may_wait=True, execution=1),
        choose_instance(list(by_name.values()), 100, 9, published),
    )


def test_nobody_to_choose() -> None:
    assert DispatchIndex([], settings()).choose(1, 0) is None


def test_a_decision_shows_what_it_was_made_from_whatever_comes_after() -> None:
    now = [instance("a", used=500, running=1), instance("b", used=600, running=1)]
    index = DispatchIndex(now, settings())
    decisions: list[tuple[DispatchDecision, Sequence[InstanceObservation]]] = []
    kept = 0
    for number in range(20):
        changed = instance("a", used=10 * number, running=1)
        index.update([changed])
        now = [changed, now[1]]
        decision = index.choose(10, number)
        assert decision is not None
        kept += kept_observations(decision.instances)
        decisions.append((decision, now))
    for decision, then in decisions:
        assert decision.instances == then
    assert kept <= 3 * 20 + 2, "each change is kept once, and a beginning for as many"


PLACES, VALUES = st.integers(0, 9), st.integers(-3, 3)


@hypothesis.settings(deadline=None)
@given(st.dictionaries(PLACES, VALUES), st.lists(st.tuples(PLACES, VALUES | st.none())), PLACES)
def test_the_order_of_a_figure(start: dict[int, float], changes: list[tuple[int, float | None]], first: int) -> None:
    order, plain = Ordered(), dict(start)
    order.fill(start)
    for place, figure in changes:
        order.put(place, figure)
        plain.pop(place, None)
        if figure is not None:
            plain[place] = figure
    assert [place for _, place in order] == sorted(plain, key=lambda place: (-plain[place], place))
    best = max(plain, key=lambda place: (plain[place], -((place - first) % 10)), default=None)
    assert order.best(first) == best
    for figure in range(-4, 5):
        assert order.at_least(figure) == sum(value >= figure for value in plain.values())
