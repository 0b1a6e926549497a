"""DirtyMap against a model of sets, and with a writer and a drainer in threads."""

import random
import threading
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from meshift.kv_memory.dirty_map import DirtyMap, slot_ranges

SLOTS = 40
READERS = ["a", "b", ("source", 1)]
slot_lists = st.lists(st.integers(0, SLOTS - 1), max_size=12)


class DirtyMapMachine(RuleBasedStateMachine):
    """The model is a set of slots per reader."""

    def __init__(self) -> None:
        super().__init__()
        self.map = DirtyMap(SLOTS)
        self.model: dict[object, set[int]] = {}

    @precondition(lambda self: len(self.model) < len(READERS))
    @rule(data=st.data(), dirty=slot_lists)
    def add_reader(self, data: st.DataObject, dirty: list[int]) -> None:
        reader = data.draw(st.sampled_from([r for r in READERS if r not in self.model]))
        self.map.add_reader(reader, dirty)
        self.model[reader] = set(dirty)

    @rule(reader=st.sampled_from(READERS))
    def remove_reader(self, reader: object) -> None:
        self.map.remove_reader(reader)
        self.model.pop(reader, None)

    @rule(slots=slot_lists)
    def mark(self, slots: list[int]) -> None:
        self.map.mark(slots)
        for dirty in self.model.values():
            dirty.update(slots)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), slots=slot_lists)
    def mark_for(self, data: st.DataObject, slots: list[int]) -> None:
        reader = data.draw(st.sampled_from(list(self.model)))
        self.map.mark_for(reader, slots)
        self.model[reader].update(slots)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def swap(self, data: st.DataObject) -> None:
        reader = data.draw(st.sampled_from(list(self.model)))
        assert self.map.swap(reader).tolist() == sorted(self.model[reader])
        self.model[reader] = set()

    @invariant()
    def counts_agree(self) -> None:
        assert self.map.readers == tuple(self.model)
        for reader, dirty in self.model.items():
            assert self.map.count(reader) == len(dirty)


TestDirtyMap = DirtyMapMachine.TestCase


def test_marks_without_readers_cost_nothing_and_are_forgotten() -> None:
    dirty = DirtyMap(8)
    dirty.mark([1, 2])
    dirty.add_reader("late")
    assert dirty.count("late") == 0


@pytest.mark.parametrize("slots", [[-1], [8], [0, 1, 9]])
def test_slots_that_do_not_exist_are_refused(slots: list[int]) -> None:
    dirty = DirtyMap(8)
    with pytest.raises(IndexError):
        dirty.add_reader("a", slots)
    dirty.add_reader("a")
    with pytest.raises(IndexError):
        dirty.mark(slots)
    with pytest.raises(IndexError):
        dirty.mark_for("a", slots)
    assert dirty.count("a") == 0


def test_readers_are_known_by_name() -> None:
    dirty = DirtyMap(8)
    dirty.add_reader("a")
    with pytest.raises(ValueError, match="already"):
        dirty.add_reader("a")
    with pytest.raises(KeyError):
        dirty.swap("b")
    with pytest.raises(KeyError):
        dirty.count("b")


def test_mark_takes_arrays_of_any_integer_type() -> None:
    dirty = DirtyMap(8)
    dirty.add_reader("a")
    dirty.mark(np.array([7, 3], np.int32))
    dirty.mark(np.array([[3], [1]], np.uint8))
    assert dirty.swap("a").tolist() == [1, 3, 7]


def test_mark_between_look_and_clear_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    dirty = DirtyMap(8)
    dirty.add_reader("a", [1, 2])
    look = np.flatnonzero

    def look_and_be_interrupted(bits: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> object:
        found = look(bits)
        dirty.mark([2, 5])
        return found

    monkeypatch.setattr(np, "flatnonzero", look_and_be_interrupted)
    first = dirty.swap("a").tolist()
    monkeypatch.undo()
    assert first == [1, 2]
    assert dirty.swap("a").tolist() == [5]


def test_no_write_is_missed_between_threads() -> None:
    """A writer writes and marks, a drainer clears and copies; when both are done the copies are equal."""
    slots, steps, seed = 512, 3000, 5
    rng = random.Random(seed)
    written = np.zeros(slots, np.int64)
    copies = [np.zeros(slots, np.int64), np.zeros(slots, np.int64)]
    dirty = DirtyMap(slots)
    for reader in range(2):
        dirty.add_reader(reader)
    done = threading.Event()

    def write() -> None:
        for step in range(1, steps + 1):
            batch = np.array(rng.sample(range(slots), 4))
            written[batch] = step
            dirty.mark(batch)
        done.set()

    def drain(reader: int) -> None:
        last = False
        while not last:
            last = done.is_set()
            batch = dirty.swap(reader)
            copies[reader][batch] = written[batch]
            time.sleep(0)

    threads = [threading.Thread(target=write), *(threading.Thread(target=drain, args=(r,)) for r in range(2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert not any(thread.is_alive() for thread in threads)
    for copy in copies:
        assert np.array_equal(copy, written), seed


@given(st.sets(st.integers(0, 60)), st.integers(0, 5))
def test_slot_ranges(slots: set[int], gap_max: int) -> None:
    ranges = slot_ranges(np.array(sorted(slots), np.int64), gap_max)
    covered = [slot for start, end in ranges for slot in range(start, end)]
    assert slots <= set(covered)
    assert covered == sorted(set(covered))
    for start, end in ranges:
        assert {start, end - 1} <= slots
        inside = [slot for slot in sorted(slots) if start <= slot < end]
        assert all(b - a <= gap_max + 1 for a, b in pairwise(inside))
    for (_, end), (start, _) in pairwise(ranges):
        assert start - end > gap_max
