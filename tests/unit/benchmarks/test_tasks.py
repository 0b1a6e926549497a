"""Runs of an experiment in one process and in several, broken off, and gone on with."""

import json
import multiprocessing
import operator
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from meshift.benchmarks import simulate
from meshift.benchmarks.experiments import resizing
from meshift.benchmarks.experiments.runs import Result, Row, Runs
from meshift.benchmarks.experiments.settings import ExperimentSettings
from meshift.benchmarks.experiments.tasks import RunFailed, Task, carry_out
from meshift.services.cli.errors import CommandError

NAMES = ("a", "b", "c", "d")


def task(name: str, work: Callable[[], Any] | None = None) -> Task:
    return Task(name, {"name": name}, work or partial(results, name))


def results(name: str) -> list[Result]:
    return [({"name": name, "value": 1.5, "none": None}, {"samples": [name]})]


def encoded(name: str) -> Callable[[], list[Result]]:
    """The same work, of the standard library alone: another process needn't import this module."""
    return partial(json.loads, json.dumps(results(name)))


def names(rows: Sequence[Row]) -> list[str]:
    return [row["name"] for row in rows]


def raw_names(path: Path) -> list[str]:
    return names([json.loads(line) for line in path.with_name("told.json.raw.jsonl").read_text().splitlines()])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "told.json"


def test_rows_lie_in_the_order_of_the_experiment_whatever_ends_first(path: Path) -> None:
    runs = Runs("serving", "hash", path)
    for place in (2, 0, 3, 1):
        runs.add_all(results(NAMES[place]), place)
    assert names(json.loads(path.read_text())["rows"]) == list(NAMES)
    assert raw_names(path) == ["c", "a", "d", "b"]


def test_several_processes_give_what_one_gives(path: Path, tmp_path: Path) -> None:
    alone = Runs("serving", "hash", tmp_path / "alone.json")
    carry_out([task(name) for name in NAMES], alone, jobs=1)
    together = Runs("serving", "hash", path)
    carry_out([task(name, encoded(name)) for name in NAMES], together, jobs=2)
    assert together.rows == alone.rows
    assert path.read_text() == (tmp_path / "alone.json").read_text()
    assert sorted(raw_names(path)) == list(NAMES)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_failure_is_told_with_its_run_and_what_has_ended_is_kept(path: Path, jobs: int) -> None:
    runs = Runs("serving", "hash", path)
    fails = task("cell of seed 7", partial(operator.getitem, {}, "missing"))
    with pytest.raises(RunFailed, match="cell of seed 7: KeyError: 'missing'"):
        carry_out([task("a", encoded("a")), fails], runs, jobs)
    if jobs == 1:
        assert raw_names(path) == ["a"]
    assert not multiprocessing.active_children()


def test_what_cannot_be_run_is_a_value_error_with_its_run(path: Path) -> None:
    with pytest.raises(ValueError, match="cell of seed 8: Expecting value"):
        carry_out([task("cell of seed 8", partial(json.loads, ""))], Runs("serving", "hash", path), jobs=1)


@pytest.mark.slow
def test_breaking_off_ends_the_other_processes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ctrl-C does, while one run is on its way."""
    runs = Runs("serving", "hash", path)

    def interrupt(results: Sequence[Result], place: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "add_all", interrupt)
    begin_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        carry_out([task("a", encoded("a")), task("b", partial(time.sleep, 3_600))], runs, jobs=2)
    assert time.monotonic() - begin_s < 600
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_a_killed_process_is_told_with_its_run(path: Path) -> None:
    dies = task("cell of seed 9", partial(eval, "__import__('os')._exit(3)"))
    with pytest.raises(RunFailed, match=r"cell of seed 9|another run"):
        carry_out([dies, dies], Runs("serving", "hash", path), jobs=2)
    assert not multiprocessing.active_children()


PARENT = """
import functools, multiprocessing, threading, time
from meshift.benchmarks.experiments.runs import Runs
from meshift.benchmarks.experiments.tasks import Task, carry_out

def tell():
    while len(multiprocessing.active_children()) < 2:
        time.sleep(0.01)
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)

threading.Thread(target=tell, daemon=True).start()
tasks = [Task(name, {"name": name}, functools.partial(time.sleep, 3_600)) for name in "ab"]
carry_out(tasks, Runs("serving", "hash", None), jobs=2)
"""


@pytest.mark.slow
def test_processes_end_when_their_parent_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        children = [int(pid) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert len(children) == 2
    until_s = time.monotonic() + 60
    while any(map(is_running, children)):
        assert time.monotonic() < until_s, children
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_going_on_does_what_is_missing_and_keeps_the_rest(path: Path) -> None:
    asked = {"requests": 10}
    carry_out([task("b"), task("z")], Runs("serving", "hash", path, asked), jobs=1)
    done: list[str] = []

    def work(name: str) -> list[Result]:
        done.append(name)
        return results(name)

    runs = Runs("serving", "hash", path, asked, resume=True)
    carry_out([task(name, partial(work, name)) for name in NAMES], runs, jobs=1)
    assert done == ["a", "c", "d"]
    # Those that were not asked for now come first.
    assert names(runs.rows) == ["z", *NAMES]
    assert json.loads(path.read_text())["rows"] == runs.rows
    assert raw_names(path) == ["b", "z", "a", "c", "d"]
    again = Runs("serving", "hash", path, asked, resume=True)
    carry_out([task(name, partial(work, name)) for name in (*NAMES, "z")], again, jobs=1)
    assert done == ["a", "c", "d"]
    assert names(again.rows) == [*NAMES, "z"]


def test_raw_samples_without_a_row_are_left_out(path: Path) -> None:
    """It was broken off between the two, or amid a line."""
    carry_out([task("a")], Runs("serving", "hash", path), jobs=1)
    with path.with_name("told.json.raw.jsonl").open("a") as file:
        file.write(json.dumps({"name": "b", "value": 1.5, "none": None, "samples": ["b"]}) + "\n" + '{"name": "c", ')
    runs = Runs("serving", "hash", path, resume=True)
    carry_out([task("a"), task("b")], runs, jobs=1)
    assert raw_names(path) == ["a", "b"]


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (("priority", "hash", 10), "experiment"),
        (("serving", "other", 10), "parameters_hash"),
        (("serving", "hash", 11), "requests"),
    ],
)
def test_a_file_of_others_is_not_gone_on_with(path: Path, other: tuple[str, str, int], told: str) -> None:
    carry_out([task("a")], Runs("serving", "hash", path, {"requests": 10}), jobs=1)
    before = path.read_text()
    experiment, parameters_hash, requests = other
    with pytest.raises(ValueError, match=f"{told}.*can't be gone on with"):
        Runs(experiment, parameters_hash, path, {"requests": requests}, resume=True)
    assert path.read_text() == before


def test_going_on_needs_a_file() -> None:
    with pytest.raises(CommandError, match="--json"):
        simulate.main(["--experiment", "combined", "--quick", "--requests", "5", "--resume"])


def test_a_real_experiment_is_gone_on_with(path: Path) -> None:
    arguments = ["--experiment", "combined", "--quick", "--requests", "8", "--json", str(path)]
    assert simulate.main([*arguments, "--policies", "infaas++"]) == 0
    first = json.loads(path.read_text())["rows"]
    assert simulate.main([*arguments, "--policies", "llumnix,infaas++", "--resume"]) == 0
    told = json.loads(path.read_text())
    assert [row["policy"] for row in told["rows"]] == ["llumnix", "infaas++"]
    assert told["rows"][1:] == first
    assert [line["policy"] for line in told["summary"]] == ["llumnix", "infaas++"]


def test_a_climb_is_one_task_and_its_greatest_sustained_rate_is_told() -> None:
    def row(mode: str, rate: float, p99_s: float) -> Row:
        return {"requests": 200, "seed": 1, "mode": mode, "rate": rate, "prefill_p99_s": p99_s}

    rows = [row("resize", 1.0, 0.5), row("resize", 2.0, 5.0), row("resize", 3.0, 5.1), row("no-resize", 1.0, 9.0)]
    (line,) = resizing.summarise(rows)
    assert line == {"requests": 200, "seed": 1, "resize": 2.0, "no-resize": 0.0, "static": 0.0, "ratio": None}


def test_processes() -> None:
    assert ExperimentSettings(quick=True).processes == 1
    assert ExperimentSettings(quick=True, jobs=3).processes == 3
    assert ExperimentSettings().processes >= 1
