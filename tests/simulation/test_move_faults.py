"""A fault at every transition of both tables of a move, and what must hold afterwards: the stream is exact, nobody
holds anything any more, and no request ever had two owners (`tests/support/move_faults.py`).

Each transition is spoilt in some ways where it is first seen in the courses; the soak spoils every occurrence in every
course in every way."""

from functools import lru_cache
from itertools import cycle, islice

import pytest

from meshift.services.worker.moves import destination_table, source_table
from meshift.services.worker.moves.source_table import SourceEvent, SourceState
from tests.support.move_faults import COURSES, FAULTS, Transition, run_course

MAIN_FAULTS = (
    "drop", "delay", "duplicate", "kill-source", "kill-destination", "kill-frontend", "cut-data-plane", "close-source",
)  # fmt: skip
"""In turn, some at each transition; all of them, and others, in a soak."""

FAULTS_EACH = 3
"""Has no divisor in common with the number of faults, so that each comes with each state in time."""

ALL = {(f"source {state}", event.value) for state, event in source_table.TRANSITIONS} | {
    (f"destination {state}", event.value) for state, event in destination_table.TRANSITIONS
}

RARE = {
    # Repeated and late messages that meet an engine that is at work: it takes no time in simulation, where a
    # destination's engine answers within the call. tests/unit/worker/moves/test_destination.py has slow ones.
    ("destination reserving", "abort"),
    ("destination reserving", "commit"),
    ("destination reserving", "question"),
    ("destination reserving", "reserve"),
    ("destination aborted", "room"),
    ("destination aborted", "no_room"),
    ("destination committing", "reserve"),
    ("destination committing", "room"),
    ("destination committing", "no_room"),
    ("destination committing", "commit"),
    ("destination committing", "question"),
    ("destination committing", "abort"),
    ("destination committed", "room"),
    ("destination committed", "no_room"),
    ("destination new", "commit"),
    ("destination new", "question"),
    # In the instant in which the order comes: tests/simulation/test_moves.py.
    ("source choosing", "over"),
    ("source choosing", "refused"),
    ("source beginning", "refused"),
}


@lru_cache(maxsize=1)
def places() -> dict[str, dict[Transition, int]]:
    """Where each transition is first seen, by course."""
    found: dict[str, dict[Transition, int]] = {}
    seen: set[Transition] = set()
    for course in COURSES:
        found[course] = {}
        for at, transition in enumerate(run_course(course, "nothing", None)):
            if transition not in seen:
                seen.add(transition)
                found[course][transition] = at
    return found


@lru_cache(maxsize=1)
def faults() -> dict[Transition, tuple[str, ...]]:
    """Those of each transition."""
    turns = cycle(MAIN_FAULTS)
    return {transition: tuple(islice(turns, FAULTS_EACH)) for course in places().values() for transition in course}


@pytest.mark.parametrize("course", COURSES)
def test_faults_at_each_transition(course: str) -> None:
    for transition, at in places()[course].items():
        for fault in faults()[transition]:
            try:
                run_course(course, fault, at)
            except BaseException as error:
                raise AssertionError(f"{fault} at {at}, {transition}, of {course}") from error


def test_each_fault_comes_to_both_ends_of_a_move() -> None:
    for end in ("source", "destination"):
        assert {fault for (state, _), some in faults().items() if state.startswith(end) for fault in some} == set(
            MAIN_FAULTS
        )


def test_the_courses_take_most_transitions() -> None:
    seen = {transition for course in places().values() for transition in course}
    assert seen <= ALL
    assert len(seen) >= 40, sorted(ALL - seen)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_every_fault_at_every_transition_of_every_course() -> None:
    broken, seen = {}, set()
    for course in COURSES:
        for fault in FAULTS:
            for at in range(len(run_course(course, "nothing", None))):
                try:
                    seen.update(run_course(course, fault, at))
                except Exception as error:
                    broken[course, fault, at] = repr(error)
    assert not broken
    assert ALL - seen <= RARE


@pytest.mark.parametrize(
    ("course", "state", "event", "guess"),
    [
        ("severed", SourceState.ASKING, SourceEvent.NO_ANSWER, SourceState.RESUMING),
        ("severed-undecided", SourceState.COMMITTING, SourceEvent.NO_ANSWER, SourceState.RESUMING),
        ("late-commit", SourceState.COMMITTING, SourceEvent.NO_ANSWER, SourceState.RELEASING),
    ],
)
def test_a_protocol_that_guesses_is_found_out(
    course: str, state: SourceState, event: SourceEvent, guess: SourceState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(source_table.TRANSITIONS, (state, event), guess)
    with pytest.raises(AssertionError, match=r"runs on worker-\d|nobody's for a while"):
        run_course(course, "nothing", None)
