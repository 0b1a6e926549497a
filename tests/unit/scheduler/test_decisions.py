"""The ring of decisions."""

import math

from meshift.schemas.steering import DecisionSubject
from meshift.services.scheduler.decisions import ALTERNATIVES_TOLD_MAX, DecisionLog
from meshift.services.scheduler.policy.dispatch import choose_instance
from meshift.services.scheduler.policy.observation import Alternative, Explanation
from meshift.services.scheduler.policy.pairing import pair_instances
from tests.unit.scheduler.kit import PLAIN, instance, settings

DISPATCH, PAIR, SCALING = DecisionSubject.DISPATCH, DecisionSubject.PAIR, DecisionSubject.SCALING


class Made:
    """A decision that says so; asking for its words is counted."""

    def __init__(self, name: str, alternatives: int = 0) -> None:
        self.name = name
        self.alternatives = alternatives
        self.asked = 0

    def explain(self) -> Explanation:
        self.asked += 1
        others = [Alternative(f"i{index}", {"freeness": -math.inf}, "full") for index in range(self.alternatives)]
        return Explanation(self.name, "because", {"a": math.nan, "b": True}, [*others, Alternative("chosen", {})])


def test_words_are_made_only_when_asked_for() -> None:
    log, made = DecisionLog(), Made("x")
    log.add(DISPATCH, made, 3, 1.0, "m", "r", 2)
    assert made.asked == 0
    (told,) = log.newest(3.5, 10)
    assert (told.decision, told.why, told.age_s, told.request_id, told.attempt) == ("x", "because", 2.5, "r", 2)
    assert made.asked == 1


def test_the_newest_come_first_and_the_oldest_go() -> None:
    log = DecisionLog(decisions_max=3)
    for number in range(5):
        log.add(DISPATCH, Made(str(number)), 1, float(number), "m")
    assert [item.decision for item in log.newest(9.0, 10)] == ["4", "3", "2"]
    assert [item.decision for item in log.newest(9.0, 2)] == ["4", "3"]
    assert (log.decided, len(log)) == (5, 3)


def test_memory_is_bounded_by_observations() -> None:
    log = DecisionLog(observations_max=10)
    for number in range(5):
        log.add(DISPATCH, Made(str(number)), 4, 0.0, "m")
    assert len(log) == 2
    log.add(DISPATCH, Made("large"), 40, 0.0, "m")
    assert [item.decision for item in log.newest(0.0, 9)] == ["large"], "one is always known"


def test_by_subject_and_by_request() -> None:
    log = DecisionLog()
    log.add(DISPATCH, Made("a"), 1, 0.0, "m", "r1")
    log.add(PAIR, Made("b"), 1, 0.0, "m")
    log.add(DISPATCH, Made("c"), 1, 0.0, "m", "r2")
    assert [item.decision for item in log.newest(0.0, 9, DISPATCH)] == ["c", "a"]
    assert [item.decision for item in log.newest(0.0, 9, request_id="r1")] == ["a"]
    assert log.newest(0.0, 9, PAIR, "r1") == ()


def test_looks_take_each_others_place() -> None:
    log = DecisionLog()
    log.look(SCALING, Made("old"), 1.0, "m")
    log.look(SCALING, Made("new"), 2.0, "m")
    log.look(PAIR, Made("pairs"), 2.0, "m")
    assert [(item.decision, item.age_s) for item in log.current(4.0)] == [("pairs", 2.0), ("new", 2.0)]
    for named in DecisionSubject:
        assert [item for item in log.current(4.0) if item.subject is named] == list(log.current(4.0, named))
    assert (log.decided, len(log)) == (0, 0)


def test_only_what_json_can_say_is_told_and_the_chosen_come_first() -> None:
    log = DecisionLog()
    log.add(DISPATCH, Made("x", alternatives=ALTERNATIVES_TOLD_MAX + 4), 1, 0.0, "m")
    (told,) = log.newest(0.0, 1)
    assert told.inputs == {"a": None, "b": True}
    assert [item.name for item in told.alternatives[:2]] == ["chosen", "i0"]
    assert told.alternatives[1].figures == {"freeness": None}
    assert (len(told.alternatives), told.alternatives_left_out) == (ALTERNATIVES_TOLD_MAX, 5)


def test_real_decisions_are_told() -> None:
    loads = [instance("a", used=900, running=9), instance("b")]
    log = DecisionLog()
    dispatched = choose_instance(loads, 300, 0, settings())
    assert dispatched is not None
    log.add(DISPATCH, dispatched, 2, 0.0, "m", "r", 1)
    log.add(PAIR, pair_instances([instance("a", used=990, running=9), loads[1]], PLAIN, 0.0, {}), 2, 0.0, "m")
    pair, dispatch = log.newest(0.0, 9)
    assert dispatch.decision == "b#1"
    assert [(item.name, item.rejected) for item in dispatch.alternatives] == [
        ("b#1", ""),
        ("a#1", "room for 100 of 300 tokens"),
    ]
    assert pair.decision == "a#1 to b#1"
    assert pair.inputs["out_below"] == 3.0
