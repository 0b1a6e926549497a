"""The centralized scheduler."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshift.schemas.identity import Owner
from meshift.services.scheduler.policy.central import CentralScheduler

A, B = Owner("a", 1), Owner("b", 1)


def test_it_knows_every_token_of_every_step() -> None:
    central = CentralScheduler([A, B], 60, 16)
    first = central.dispatch("r1", 100)
    second = central.dispatch("r2", 50)
    assert {first, second} == {A, B}
    assert central.dispatch("r3", 10) == second, "the least loaded"
    assert central.on_step(second, []).admitted == ("r2", "r3")
    for _ in range(60):
        assert central.on_step(second, []).admitted == ()
    assert central.load(second) == 60 + 2 * 60
    assert central.dispatch("r4", 10) == first
    step = central.on_step(second, ["r2"])
    assert (step.running, central.load(second)) == (1, 10 + 61)
    assert central.requests() == 3
    central.on_step(second, ["never seen"])
    assert central.load(second) == 10 + 62


def test_ties_go_round_robin() -> None:
    central = CentralScheduler([A, B], 10, 16)
    assert [central.dispatch(f"r{index}", 5) for index in range(4)].count(A) == 2


def test_nobody_to_choose() -> None:
    with pytest.raises(ValueError, match="no instances"):
        CentralScheduler([], 10, 16).dispatch("r", 1)


def test_what_does_not_fit_waits_and_who_came_last_gives_way() -> None:
    central = CentralScheduler([A], 4, 16)
    for name, prompt in (("old", 15), ("new", 15), ("large", 40)):
        central.dispatch(name, prompt)
    assert central.on_step(A, []).admitted == ("old", "new")
    step = central.on_step(A, [])
    assert (step.admitted, step.preempted, step.running) == ((), (), 2)
    for _ in range(16):
        step = central.on_step(A, [])
    assert (step.preempted, step.running) == (("new",), 1)
    assert central.on_step(A, ["old"]).admitted == ("new",), "one that gave way comes before those that never began"
    assert central.requests() == 2


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 3)), max_size=20), st.integers(4, 12))
def test_pages_and_loads_add_up(history: list[tuple[int, int]], pages: int) -> None:
    central = CentralScheduler([A], pages, 16)
    running: list[str] = []
    tokens: dict[str, int] = {}
    for number, (prompt, steps) in enumerate(history):
        central.dispatch(f"r{number}", prompt)
        tokens[f"r{number}"] = prompt
        for _ in range(steps):
            ended = running[:1]
            for name in running:
                tokens[name] += 1
            step = central.on_step(A, ended)
            for name in ended:
                del tokens[name]
            running = [name for name in running if name not in (*ended, *step.preempted)] + list(step.admitted)
            assert step.running == len(running)
            assert sum(tokens[name] // 16 for name in running) <= pages
        assert central.load(A) == sum(tokens.values())
        assert central.requests() == len(tokens)
