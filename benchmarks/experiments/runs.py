"""Runs of the simulated mesh, kept one by one, so that an experiment that is broken off has what it did."""

import json
import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import Progress

from meshift.services.simulation.measures import Measures, decode_ms, end_to_end_s, preemption_loss_s, prefill_s
from meshift.services.simulation.serving_run import ServingResult

Row = dict[str, Any]
Result = tuple[Row, Row]
"""A run's row, and what each of its requests saw."""

EARLIER = -1
"""The place of rows that a file had already, before all that are asked for now."""


def figures(measures: Measures) -> Row:
    """The columns of a row, by the names under which they are published."""
    return {
        "prefill_p99_s": measures.prefill_s.p99,
        "prefill_p50_s": measures.prefill_s.p50,
        "prefill_mean_s": measures.prefill_s.mean,
        "decode_p99_ms": measures.decode_ms.p99,
        "decode_mean_ms": measures.decode_ms.mean,
        "e2e_p99_s": measures.end_to_end_s.p99,
        "e2e_mean_s": measures.end_to_end_s.mean,
        "waited_p99_s": measures.waited_s.p99,
        "waited_mean_s": measures.waited_s.mean,
        "preemption_loss_s_mean": measures.preemption_loss_s_mean,
        "preempted_share": measures.preempted_share,
        "moves_per_request": measures.moves_per_request,
        "reversed_moves": measures.reversed_moves,
        "moved_often_share": measures.moved_often_share,
        "fragmented_share": measures.fragmented_share,
        "used_share": measures.used_share,
        "negative_freeness_share": measures.negative_freeness_share,
        "negative_freeness_s_max": measures.negative_freeness_s_max,
        "instances_mean": measures.instances_mean,
        "virtual_s": measures.virtual_s,
    }


def samples(result: ServingResult) -> Row:
    """What each request saw, in order of arrival; from this all figures of a row can be computed again but those of
    memory, which are of time and not of requests."""
    outcomes = result.outcomes
    finishes = [outcome.finish for outcome in outcomes]
    return {
        "arrival_s": [round(outcome.arrival_s, 6) for outcome in outcomes],
        "prefill_s": [round(prefill_s(outcome), 6) for outcome in outcomes],
        "decode_ms": [round(decode_ms(outcome), 4) if len(outcome.tokens) > 1 else None for outcome in outcomes],
        "e2e_s": [round(end_to_end_s(outcome), 6) for outcome in outcomes],
        "preemptions": [0 if finish is None else finish.preemptions for finish in finishes],
        "preemption_loss_s": [round(preemption_loss_s(outcome), 6) for outcome in outcomes],
        "moves": [outcome.moves for outcome in outcomes],
        "priority": [outcome.request.priority.execution for outcome in outcomes],
    }


@dataclass
class Runs:
    """Rows and raw samples of one experiment. The file has the rows in the order of the experiment; the raw ones beside
    it lie in the order in which the runs have ended. With `resume`, what both have already is kept. Raises ValueError
    if that is of others."""

    experiment: str
    parameters_hash: str
    path: Path | None
    asked: Row = field(default_factory=dict)
    """What all runs have in common beside the parameters."""
    resume: bool = False
    rows: list[Row] = field(default_factory=list)
    summary: list[Row] = field(default_factory=list)
    answers: Row = field(default_factory=dict)
    """What the experiment asks for, by name."""
    _places: list[int] = field(default_factory=list)
    """Of the rows, ascending."""

    def __post_init__(self) -> None:
        if self.path is None:
            if self.resume:
                raise ValueError("--resume goes on with a file: --json says which")
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.resume and self.path.exists():
            self._load(self.path)
        else:
            self._raw_path(self.path).write_text("")
        self._write(self.path)

    def take(self, place: int, columns: Row) -> bool:
        """Put the rows that have these columns there. Returns whether there are some: then they need no run."""
        mine = [row for row in self.rows if all(row.get(name) == value for name, value in columns.items())]
        for row in mine:
            index = self.rows.index(row)
            del self.rows[index], self._places[index]
            self._put(row, place)
        return bool(mine)

    def add(self, row: Row, raw: Row) -> None:
        """A run has ended."""
        self.add_all([(row, raw)], 0)

    def add_all(self, results: Sequence[Result], place: int) -> None:
        """Runs have ended that belong there in the order, and that are known all or none."""
        for row, _ in results:
            self._put(row, place)
        if self.path is not None:
            with self._raw_path(self.path).open("a") as file:
                file.writelines(json.dumps(row | raw) + "\n" for row, raw in results)
            self._write(self.path)

    def conclude(self, summary: Sequence[Row], answers: Mapping[str, Any] | None = None) -> None:
        """All runs have ended."""
        self.summary = list(summary)
        self.answers = dict(answers or {})
        if self.path is not None:
            self._write(self.path)

    def _put(self, row: Row, place: int) -> None:
        index = bisect_right(self._places, place)
        self._places.insert(index, place)
        self.rows.insert(index, row)

    @staticmethod
    def _raw_path(path: Path) -> Path:
        return path.with_name(path.name + ".raw.jsonl")

    def _names(self) -> Row:
        return {"experiment": self.experiment, "parameters_hash": self.parameters_hash, **self.asked}

    def _write(self, path: Path) -> None:
        told = {**self._names(), "rows": self.rows, "summary": self.summary, **self.answers}
        _replace(path, json.dumps(told, indent=1) + "\n")

    def _load(self, path: Path) -> None:
        told = json.loads(path.read_text())
        for name, value in self._names().items():
            if told.get(name) != value:
                raise ValueError(f"{path} has {name} {told.get(name)}, not {value}: it can't be gone on with")
        self.rows = told["rows"]
        self._places = [EARLIER] * len(self.rows)
        raw = self._raw_path(path)
        if raw.exists():
            _replace(raw, "".join(_of_rows(raw.read_text().splitlines(keepends=True), self.rows)))


def _of_rows(lines: Sequence[str], rows: Sequence[Row]) -> Iterator[str]:
    """The raw lines of these rows. One that was broken off, or whose row isn't known, is left out: it is run again."""
    wanted = list(rows)
    for line in lines:
        try:
            raw = json.loads(line)
        except ValueError:
            continue
        row = next((row for row in wanted if row.items() <= raw.items()), None)
        if row is not None:
            wanted.remove(row)
            yield line


def _replace(path: Path, text: str) -> None:
    """The whole file or nothing: whoever breaks off an experiment may do so at any time."""
    new = path.with_name(path.name + ".new")
    new.write_text(text)
    os.replace(new, path)


def paired(rows: Sequence[Row], groups: Sequence[str], figure: str, against: str, policy: str = "meshift") -> list[Row]:
    """How many times greater `figure` is under `against` than under `policy`, seed by seed: the median over the seeds,
    with the least and the greatest. Rows of an older version of the code may lack it."""
    table: dict[tuple[Any, ...], dict[str, dict[int, float]]] = {}
    for row in (row for row in rows if figure in row):
        group = table.setdefault(tuple(row[name] for name in groups), {})
        group.setdefault(row["policy"], {})[row["seed"]] = row[figure]
    result = []
    for key, policies in table.items():
        ours, theirs = policies.get(policy, {}), policies.get(against, {})
        ratios = [theirs[seed] / ours[seed] for seed in sorted(ours.keys() & theirs.keys()) if ours[seed]]
        if ratios:
            spread = {"median": median(ratios), "least": min(ratios), "greatest": max(ratios), "seeds": len(ratios)}
            names = dict(zip(groups, key, strict=True))
            result.append({**names, "figure": figure, "ratio": f"{against} / {policy}", **spread})
    return result


def print_rows(rows: Sequence[Row]) -> None:
    """As a table; numbers with four digits."""
    if not rows:
        return
    names = list(rows[0])
    cells = [names, *([_cell(row.get(name)) for name in names] for row in rows)]
    widths = [max(len(line[index]) for line in cells) for index in range(len(names))]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@contextmanager
def progress(total: int) -> Iterator[Any]:
    """Call what it gives with the name of each run that begins."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)

        def begin(name: str) -> None:
            bar.update(task, description=name)
            bar.advance(task)

        yield begin
