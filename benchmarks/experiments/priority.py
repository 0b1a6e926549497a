"""Llumnix's section 6.4: what high priority is worth to those who have it, and what it costs the others."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median

from meshift.benchmarks.experiments.charts import Series, draw
from meshift.benchmarks.experiments.runs import Result, Row, Runs, figures, print_rows, samples
from meshift.benchmarks.experiments.settings import ExperimentSettings
from meshift.benchmarks.experiments.tasks import Task, carry_out
from meshift.services.scheduler.policy.settings import POLICIES as POLICY_NAMES
from meshift.services.scheduler.policy.settings import PolicyName
from meshift.services.simulation.clients import Outcome
from meshift.services.simulation.measures import measure
from meshift.services.simulation.scenario import Cluster, Workload
from meshift.services.simulation.serving_run import run_serving

TRACE, RATE = "S-S", 26.0
CVS = (2.0, 4.0, 6.0, 8.0)
SHARES = (0.1, 0.3, 0.5)
POLICIES: tuple[PolicyName, ...] = ("meshift", "llumnix", "llumnix-base")
BLIND = "meshift, blind"
"""The same requests, all of normal priority, and told apart only in the figures."""
NAMES: Mapping[str, PolicyName] = {policy: policy for policy in POLICY_NAMES}
BASES = {"meshift": BLIND, "llumnix": "llumnix-base"}
"""With what each is compared: itself with all priorities equal."""
CLASSES = {0: "normal", 1: "high"}
COLUMNS = ("prefill_mean_s", "prefill_p99_s", "decode_mean_ms", "decode_p99_ms", "e2e_mean_s", "e2e_p99_s")


def run(settings: ExperimentSettings, cluster: Cluster) -> Runs:
    """Bursts of growing size with a tenth of high priority; then greater shares. Both readings of the headroom."""
    cvs, shares = ((4.0,), (0.1,)) if settings.quick else (CVS, SHARES)
    ways: list[str] = []
    for policy in settings.policies or (("meshift",) if settings.quick else POLICIES):
        ways += [policy, BLIND] if policy == "meshift" else [policy]
    count = 2 if settings.quick else settings.seeds
    cases = [(cv, share) for cv in cvs for share in shares if share == SHARES[0] or cv == CVS[1]]
    runs = Runs(
        "priority", cluster.parameters_hash(), settings.json_path, {"requests": settings.requests}, settings.resume
    )
    readings = [cluster, *([] if settings.quick else [_reserving(cluster)])]
    tasks = [
        _task(reading, settings.requests, cv, share, seed, way)
        for seed in range(settings.first_seed, settings.first_seed + count)
        for cv, share in cases
        for reading in readings
        for way in ways
    ]
    carry_out(tasks, runs, settings.processes)
    runs.conclude(summarise(runs.rows))
    print_rows(runs.summary)
    draw(settings.json_path, "High priority against none", "CV of gaps", "times faster", _chart(runs.summary))
    return runs


def _chart(summary: Sequence[Row]) -> Series:
    series: dict[str, list[tuple[float, float]]] = {}
    for line in summary:
        if line["high_share"] == SHARES[0]:
            for column in ("prefill_mean_s", "decode_mean_ms"):
                gain = line.get(f"high_{column}_gain")
                if gain is not None:
                    name = f"{line['policy']}, {column.partition('_')[0]}"
                    series.setdefault(f"{name} ({line['reading'][0]})", []).append((line["cv"], gain))
    return series


def _reserving(cluster: Cluster) -> Cluster:
    return cluster.model_copy(update={"usage": cluster.usage.model_copy(update={"reading": "reservation"})})


def _task(cluster: Cluster, requests: int, cv: float, share: float, seed: int, policy: str) -> Task:
    reading = cluster.usage.reading
    columns = {"cv": cv, "high_share": share, "reading": reading, "seed": seed, "policy": policy}
    work = partial(_run, cluster, requests, cv, share, seed, policy)
    return Task(f"CV {cv:g} {share:.0%} {reading} seed {seed} {policy}", columns, work)


def _run(cluster: Cluster, requests: int, cv: float, share: float, seed: int, policy: str) -> Result:
    workload = Workload(trace=TRACE, requests=requests, rate=RATE, seed=seed, cv=cv, high_share=share)
    arrivals = workload.arrivals(cluster.tokens_max)
    sent = [replace(arrival, priority=0) for arrival in arrivals] if policy == BLIND else arrivals
    result = run_serving(cluster.options(NAMES.get(policy, "meshift"), seed), sent)
    outcomes: dict[int, list[Outcome]] = {priority: [] for priority in CLASSES}
    for outcome, arrival in zip(result.outcomes, arrivals, strict=True):
        outcomes[arrival.priority].append(outcome)
    named = {"trace": TRACE, "rate": RATE, "cv": cv, "high_share": share, "seed": seed, "policy": policy}
    classes = {
        f"{CLASSES[priority]}_{column}": figures(measure(mine, result.sums, result.virtual_s))[column]
        for priority, mine in outcomes.items()
        if mine
        for column in COLUMNS
    }
    return named | {"reading": cluster.usage.reading} | classes, samples(result)


def summarise(rows: list[Row]) -> list[Row]:
    """Of each class, how many times smaller a figure is than under the same policy with all priorities equal:
    seed by seed, the median."""
    keys = ("cv", "high_share", "reading", "policy")
    result = []
    for names in dict.fromkeys(tuple(row[key] for key in keys) for row in rows):
        case = dict(zip(keys, names, strict=True))
        if case["policy"] not in BASES:
            continue
        ours = {row["seed"]: row for row in rows if all(row[key] == case[key] for key in keys)}
        base_case = case | {"policy": BASES[case["policy"]]}
        base = {row["seed"]: row for row in rows if all(row[key] == base_case[key] for key in keys)}
        line: Row = dict(case)
        for name in CLASSES.values():
            for column in COLUMNS:
                key = f"{name}_{column}"
                ratios = [base[seed][key] / row[key] for seed, row in ours.items() if seed in base and row.get(key)]
                if ratios:
                    line[f"{key}_gain"] = median(ratios)
        result.append(line)
    return result
