"""A compilation that takes too long doesn't hold up the next ones."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from meshift.backends.sglang.plugin import overdue
from meshift.backends.sglang.plugin.overdue import CompilerThreads

DEADLINE_S = 10.0


class Compiler:
    """One thread, a clock to set, and compilations that end when they are told to."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.executor = ThreadPoolExecutor(1)
        self.threads = CompilerThreads(self.executor, 5.0, lambda: self.now_s)
        self.begun: dict[str, threading.Event] = {}
        self.end: dict[str, threading.Event] = {}

    def submit(self, name: str) -> "Future[str]":
        self.begun[name], self.end[name] = threading.Event(), threading.Event()
        return self.executor.submit(self._compile, name)

    def _compile(self, name: str) -> str:
        with self.threads.compiling(("json", name)):
            self.begun[name].set()
            assert self.end[name].wait(DEADLINE_S)
        return name


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    made = Compiler()
    yield made
    for event in made.end.values():
        event.set()
    made.executor.shutdown()


def test_what_waits_behind_a_costly_one_goes_on(compiler: Compiler) -> None:
    costly, next_one = compiler.submit("costly"), compiler.submit("next")
    assert compiler.begun["costly"].wait(DEADLINE_S)
    compiler.now_s = 4.9
    assert compiler.threads.overdue() == set()
    assert not compiler.begun["next"].is_set()
    compiler.now_s = 5.1
    assert compiler.threads.overdue() == {("json", "costly")}
    assert compiler.begun["next"].wait(DEADLINE_S)
    assert compiler.threads.overdue() == {("json", "costly")}, "and not the next one, which has just begun"
    compiler.end["next"].set()
    assert next_one.result(DEADLINE_S) == "next"
    compiler.end["costly"].set()
    assert costly.result(DEADLINE_S) == "costly"
    assert compiler.threads.overdue() == set()
    assert compiler.executor._max_workers == 1


def test_threads_given_up_are_bounded(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overdue, "ABANDONED_MAX", 2)
    for name in "abcd":
        compiler.submit(name)
    for name in "abc":
        assert compiler.begun[name].wait(DEADLINE_S)
        compiler.now_s += 5.1
        compiler.threads.overdue()
    assert compiler.executor._max_workers == 3
    assert not compiler.begun["d"].wait(0.01)
    compiler.end["b"].set()
    assert compiler.begun["d"].wait(DEADLINE_S), "the thread that has ended its own takes it"


def test_the_same_schema_twice(compiler: Compiler) -> None:
    with compiler.threads.compiling(("json", "a")):
        with compiler.threads.compiling(("json", "a")):
            compiler.now_s += 5.1
            assert compiler.threads.overdue() == {("json", "a")}
        assert compiler.threads.overdue() == {("json", "a")}
    assert compiler.threads.overdue() == set()
    assert compiler.executor._max_workers == 1


def test_one_that_raises_is_forgotten(compiler: Compiler) -> None:
    with pytest.raises(ValueError, match="no schema"), compiler.threads.compiling(("json", "x")):
        raise ValueError("no schema")
    compiler.now_s = 100.0
    assert compiler.threads.overdue() == set()
