"""Llumnix's section 6.3: latencies of the policies over traces, rates and seeds."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from statistics import median

from meshift.benchmarks.experiments.charts import draw
from meshift.benchmarks.experiments.rates import known_rates, rate_of
from meshift.benchmarks.experiments.runs import Result, Row, Runs, figures, paired, print_rows, samples
from meshift.benchmarks.experiments.settings import ExperimentSettings
from meshift.benchmarks.experiments.tasks import Task, carry_out
from meshift.services.scheduler.policy.settings import PolicyName
from meshift.services.simulation.lengths import GENERATED
from meshift.services.simulation.scenario import Cluster, Workload
from meshift.services.simulation.serving_run import ServingResult, run_serving

QUICK_TRACES = ("M-M", "L-S", "burstgpt")
QUICK_POLICIES: tuple[PolicyName, ...] = ("meshift", "infaas++", "round-robin")
QUICK_SEEDS = 4
STEADY_WARM_UP_S, STEADY_SPAN_S, STEADY_AFTER_S = 300.0, 1_800.0, 60.0
"""The steady state: what arrives in the span is measured; requests go on coming afterwards."""
FIGURES = ("prefill_p99_s", "prefill_mean_s", "decode_p99_ms", "e2e_p99_s", "e2e_mean_s", "waited_p99_s")


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of the matrix."""

    trace: str
    target_s: int
    rate: float
    seed: int
    policy: PolicyName


def cells(settings: ExperimentSettings, cluster: Cluster) -> list[Cell]:
    """All runs: seed by seed, so that one that is broken off has whole pairs."""
    rates = known_rates(cluster.engine)
    traces = settings.traces or (QUICK_TRACES if settings.quick else _at_hand(tuple(rates), settings.trace_folder))
    targets = (10,) if settings.quick else settings.targets_s
    policies = settings.policies or (QUICK_POLICIES if settings.quick else settings.all_policies)
    seeds = range(settings.first_seed, settings.first_seed + (QUICK_SEEDS if settings.quick else settings.seeds))
    return [
        Cell(trace, target, rate_of(rates, trace, target), seed, policy)
        for seed in seeds
        for trace in traces
        for target in targets
        for policy in policies
    ]


def _at_hand(traces: Sequence[str], folder: Path | None) -> tuple[str, ...]:
    """Without those whose file isn't here, which is said."""
    missing = [trace for trace in traces if trace not in GENERATED and not Path(source_of(trace, folder)).is_file()]
    for trace in missing:
        print(f"left out: {trace} isn't in {folder or 'this folder'} (--trace-folder)")
    return tuple(trace for trace in traces if trace not in missing)


def source_of(trace: str, folder: Path | None) -> str:
    """What a workload is told: a generated trace's name, or the path of a file."""
    return trace if trace in GENERATED or folder is None else str(folder / trace)


def run(settings: ExperimentSettings, cluster: Cluster, experiment: str = "serving") -> Runs:
    """The matrix, or the part of it that the settings ask for."""
    asked: Row = {"requests": settings.requests} | ({"steady": True} if settings.steady else {})
    runs = Runs(experiment, cluster.parameters_hash(), settings.json_path, asked, settings.resume)
    tasks = [task_of(cell, cluster, settings) for cell in cells(settings, cluster)]
    carry_out(tasks, runs, settings.processes)
    summary: list[Row] = []
    for against in sorted({row["policy"] for row in runs.rows} - {"meshift"}):
        for figure in FIGURES:
            summary += paired(runs.rows, ("trace", "target_s"), figure, against)
    runs.conclude(summary)
    print_rows(summary)
    draw_traces(settings.json_path, runs.rows)
    return runs


def draw_traces(path: Path | None, rows: Sequence[Row]) -> None:
    """A figure a trace: the median over the seeds of the P99 prefill, over the rate."""
    for trace in dict.fromkeys(row["trace"] for row in rows):
        mine = [row for row in rows if row["trace"] == trace]
        series = {
            policy: [
                (rate, median(row["prefill_p99_s"] for row in mine if (row["policy"], row["rate"]) == (policy, rate)))
                for rate in sorted({row["rate"] for row in mine if row["policy"] == policy})
            ]
            for policy in dict.fromkeys(row["policy"] for row in mine)
        }
        beside = None if path is None else path.with_name(f"{path.stem}-{Path(trace).stem}.json")
        draw(beside, trace, "requests/s", "P99 prefill, s (median of seeds)", series)


def task_of(cell: Cell, cluster: Cluster, settings: ExperimentSettings) -> Task:
    """One run as a task."""
    name = f"{cell.trace} {cell.rate:g}/s seed {cell.seed} {cell.policy}"
    work = partial(run_cell, cell, cluster, settings.requests, settings.trace_folder, steady=settings.steady)
    return Task(name, asdict(cell), work)


def run_cell(
    cell: Cell, cluster: Cluster, requests: int, folder: Path | None = None, *, steady: bool = False
) -> Result:
    """One run: its row, and what each request saw. Figures of memory and of time are of the whole run."""
    count = ceil(cell.rate * (STEADY_WARM_UP_S + STEADY_SPAN_S + STEADY_AFTER_S)) if steady else requests
    workload = Workload(
        trace=source_of(cell.trace, folder), requests=count, rate=cell.rate, seed=cell.seed, shuffle=True
    )
    arrivals = workload.arrivals(cluster.tokens_max)
    result = run_serving(cluster.options(cell.policy, cell.seed), arrivals)
    if steady:
        result = steady_part(result, arrivals[0].arrival_s)
    row = {
        "trace": cell.trace,
        "rate": cell.rate,
        "target_s": cell.target_s,
        "seed": cell.seed,
        "policy": cell.policy,
        "requests": len(result.outcomes),
        **figures(result.measures()),
    }
    return row, samples(result)


def steady_part(result: ServingResult, first_s: float) -> ServingResult:
    """Of the requests only those that arrived in the span; the first one came `first_s` after the beginning."""
    begin_s = result.outcomes[0].arrival_s - first_s + STEADY_WARM_UP_S
    measured = [item for item in result.outcomes if begin_s <= item.arrival_s < begin_s + STEADY_SPAN_S]
    return replace(result, outcomes=tuple(measured))
