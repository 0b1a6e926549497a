"""Virtual usage."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from meshift.backends.base import ClassUsage
from meshift.services.worker.policy.virtual_usage import (
    PriorityClass,
    VirtualUsageSettings,
    class_loads,
    freeness_at,
    request_usage,
    waiting_usage,
)

CAPACITY = 13_616
PAPER = VirtualUsageSettings()
THREE = VirtualUsageSettings(
    classes=(
        PriorityClass(name="gold", execution=2, target_load=1600),
        PriorityClass(name="silver", execution=1, target_load=6000),
        PriorityClass(name="normal", execution=0),
    )
)


def test_of_those_that_wait_only_the_head_counts() -> None:
    assert waiting_usage(700, is_head=True) == 700
    assert waiting_usage(700, is_head=False) == 0


def test_a_normal_request_counts_what_it_holds() -> None:
    assert request_usage(physical=300, execution=0, running_of_class=4, capacity=CAPACITY, settings=PAPER) == 300


def test_high_requests_share_their_class_s_headroom() -> None:
    headroom = CAPACITY - 1600
    for count in (1, 4):
        usage = request_usage(physical=300, execution=1, running_of_class=count, capacity=CAPACITY, settings=PAPER)
        assert usage == 300 + headroom / count


def test_the_other_reading_is_a_reservation() -> None:
    reserved = PAPER.model_copy(update={"reading": "reservation"})
    assert class_loads([ClassUsage(1, 3, 900)], CAPACITY, reserved)[1] == 1600
    assert class_loads([ClassUsage(1, 3, 900)], CAPACITY, PAPER)[1] == CAPACITY - 1600
    assert class_loads([ClassUsage(1, 1, 9)], 1000, PAPER)[1] == 0, "a target above the capacity needs no headroom"


def test_without_running_requests_a_class_has_no_headroom() -> None:
    assert class_loads([], CAPACITY, PAPER) == ((), 0)
    assert class_loads([ClassUsage(0, 9, 4000)], CAPACITY, PAPER)[1] == 0


def test_loads_by_class_the_most_protected_first() -> None:
    loads, headroom = class_loads(
        [ClassUsage(-1, 1, 10), ClassUsage(0, 2, 20), ClassUsage(2, 1, 40), ClassUsage(7, 1, 50)], CAPACITY, THREE
    )
    assert [(load.name, load.running, load.used) for load in loads] == [("gold", 2, 90), ("normal", 3, 30)]
    assert headroom == CAPACITY - 1600


def test_several_classes_add_up_or_the_greatest_counts() -> None:
    usages = [ClassUsage(2, 1, 10), ClassUsage(1, 1, 10)]
    assert class_loads(usages, CAPACITY, THREE)[1] == (CAPACITY - 1600) + (CAPACITY - 6000)
    greatest = THREE.model_copy(update={"combination": "maximum"})
    assert class_loads(usages, CAPACITY, greatest)[1] == CAPACITY - 1600


@pytest.mark.parametrize("executions", [(), (0, 1), (1, 1)])
def test_classes_are_in_order(executions: tuple[int, ...]) -> None:
    with pytest.raises(ValidationError, match="descending"):
        VirtualUsageSettings(classes=tuple(PriorityClass(name="x", execution=value) for value in executions))


@given(st.lists(st.builds(ClassUsage, st.integers(-2, 3), st.integers(1, 9), st.integers(0, 500)), max_size=6))
def test_the_instance_s_headroom_is_the_sum_of_its_requests_shares(usages: list[ClassUsage]) -> None:
    loads, headroom = class_loads(usages, CAPACITY, THREE)
    assert sum(load.used for load in loads) == sum(usage.used for usage in usages)
    assert sum(load.running for load in loads) == sum(usage.running for usage in usages)
    shares = sum(
        usage.running
        * request_usage(
            physical=0,
            execution=usage.execution,
            running_of_class=next(load.running for load in loads if usage.execution >= load.execution),
            capacity=CAPACITY,
            settings=THREE,
        )
        for usage in usages
        if usage.execution >= 0
    )
    assert shares == pytest.approx(headroom)


def test_freeness_of_the_instance_itself() -> None:
    arguments = {"capacity": 1000, "used": 300, "reserved": 100, "head_demand": 50, "headroom": 50}
    assert freeness_at(**arguments, running=5) == 100
    assert freeness_at(**arguments, running=0) == 500
