"""Runs of the simulated mesh, kept one by one, so that an experiment that is broken off has what it did."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import Progress

from meshift.services.simulation.measures import Measures, decode_ms, end_to_end_s, prefill_s
from meshift.services.simulation.serving_run import ServingResult

Row = dict[str, Any]


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
        "preemption_loss_s": [
            0 if finish is None else round(finish.preemption_loss_ns / 1e9, 6) for finish in finishes
        ],
        "moves": [outcome.moves for outcome in outcomes],
        "priority": [outcome.request.priority.execution for outcome in outcomes],
    }


@dataclass
class Runs:
    """Rows and raw samples of one experiment."""

    experiment: str
    parameters_hash: str
    path: Path | None
    rows: list[Row] = field(default_factory=list)
    summary: list[Row] = field(default_factory=list)
    answers: Row = field(default_factory=dict)
    """What the experiment asks for, by name."""

    def __post_init__(self) -> None:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._raw_path(self.path).write_text("")
            self._write(self.path)

    def add(self, row: Row, raw: Row) -> None:
        """A run has ended."""
        self.rows.append(row)
        if self.path is not None:
            with self._raw_path(self.path).open("a") as file:
                file.write(json.dumps(row | raw) + "\n")
            self._write(self.path)

    def conclude(self, summary: Sequence[Row], answers: Mapping[str, Any] | None = None) -> None:
        """All runs have ended."""
        self.summary = list(summary)
        self.answers = dict(answers or {})
        if self.path is not None:
            self._write(self.path)

    @staticmethod
    def _raw_path(path: Path) -> Path:
        return path.with_name(path.name + ".raw.jsonl")

    def _write(self, path: Path) -> None:
        told = {
            "experiment": self.experiment,
            "parameters_hash": self.parameters_hash,
            "rows": self.rows,
            "summary": self.summary,
            **self.answers,
        }
        path.write_text(json.dumps(told, indent=1) + "\n")


def paired(rows: Sequence[Row], groups: Sequence[str], figure: str, against: str, policy: str = "meshift") -> list[Row]:
    """How many times greater `figure` is under `against` than under `policy`, seed by seed: the median over the seeds,
    with the least and the greatest."""
    table: dict[tuple[Any, ...], dict[str, dict[int, float]]] = {}
    for row in rows:
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
