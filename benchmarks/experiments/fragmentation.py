"""Llumnix's Figure 12: how much of the cluster's memory is free and wanted, but scattered. Beside the policies of the
matrix one with explicit packing."""

from functools import partial
from statistics import fmean

from meshift.benchmarks.experiments.charts import draw
from meshift.benchmarks.experiments.rates import known_rates, rate_of
from meshift.benchmarks.experiments.runs import Result, Row, Runs, print_rows
from meshift.benchmarks.experiments.serving import Cell, run_cell
from meshift.benchmarks.experiments.settings import ExperimentSettings
from meshift.benchmarks.experiments.tasks import Task, carry_out
from meshift.services.scheduler.policy.settings import MigrationSettings, PolicyName, PolicySettings
from meshift.services.simulation.scenario import Cluster

TRACE = "M-M"
TARGET_S = 10
POLICIES: tuple[PolicyName, ...] = ("infaas++", "llumnix", "meshift")
PACKED = "llumnix, packing"


def run(settings: ExperimentSettings, cluster: Cluster) -> Runs:
    """Each policy over the seeds, at the rate where INFaaS++ has a P99 prefill of 10 s."""
    rate = rate_of(known_rates(cluster.engine), TRACE, TARGET_S)
    seeds = range(settings.first_seed, settings.first_seed + (2 if settings.quick else settings.seeds))
    runs = Runs(
        "fragmentation", cluster.parameters_hash(), settings.json_path, {"requests": settings.requests}, settings.resume
    )
    packing = cluster.model_copy(
        update={"scheduling": PolicySettings(migration=MigrationSettings(defragment=True, out_below=3.0))}
    )
    ways: list[tuple[str, PolicyName, Cluster]] = [(policy, policy, cluster) for policy in POLICIES]
    ways.append((PACKED, "llumnix", packing))
    tasks = [
        Task(
            f"seed {seed} {name}",
            {"rate": rate, "seed": seed, "policy": name},
            partial(_run, name, Cell(TRACE, TARGET_S, rate, seed, policy), used, settings.requests),
        )
        for seed in seeds
        for name, policy, used in ways
    ]
    carry_out(tasks, runs, settings.processes)
    runs.conclude(summarise(runs.rows), {row["policy"]: row["fragmented_share"] for row in summarise(runs.rows)})
    print_rows(runs.summary)
    series: dict[str, list[tuple[float, float]]] = {name: [] for name, _, _ in ways}
    for row in runs.rows:
        series.setdefault(row["policy"], []).append((row["seed"], 100 * row["fragmented_share"]))
    draw(settings.json_path, "Fragmented memory, M-M", "seed", "% of the cluster's memory", series)
    return runs


def _run(name: str, cell: Cell, cluster: Cluster, requests: int) -> Result:
    row, raw = run_cell(cell, cluster, requests)
    return row | {"policy": name}, raw


def summarise(rows: list[Row]) -> list[Row]:
    """Means over the seeds."""
    names = list(dict.fromkeys(row["policy"] for row in rows))
    columns = ("fragmented_share", "prefill_p99_s", "preemption_loss_s_mean", "moves_per_request")
    return [
        {"policy": name} | {column: fmean(row[column] for row in rows if row["policy"] == name) for column in columns}
        for name in names
    ]
