"""Llumnix's section 6.4: what high priority is worth to those who have it, and what it costs the others.

The paper doesn't tell its rate. This one is that at which the paper's own policy, blind to priorities (`llumnix-base`),
has a P99 prefill of 5 s with 10,000 requests at a CV of 4, in the median of seeds 0 to 3: the lowest of the serving
matrix's regimes. By a driver with the same engine and policies, without bus and services: 4.34 s at 43/s and 6.71 s at
44/s, the logarithm in between. One rate for all CVs, so that only burstiness varies. The number of requests is part of
the load: 4,000 at any rate below 66/s end before anything queues.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import Any

from meshift.benchmarks.experiments.charts import Series, draw
from meshift.benchmarks.experiments.combined import CLASSES as THREE_CLASSES
from meshift.benchmarks.experiments.runs import Result, Row, Runs, figures, print_rows, samples
from meshift.benchmarks.experiments.settings import ExperimentSettings
from meshift.benchmarks.experiments.tasks import Task, carry_out
from meshift.services.scheduler.policy.settings import POLICIES as POLICY_NAMES
from meshift.services.scheduler.policy.settings import PolicyName
from meshift.services.simulation.clients import Outcome
from meshift.services.simulation.measures import measure
from meshift.services.simulation.scenario import Cluster, Workload
from meshift.services.simulation.serving_run import run_serving
from meshift.services.simulation.workload import with_priorities

TRACE, RATE = "S-S", 43.3
CVS = (2.0, 4.0, 6.0, 8.0)
SHARES = (0.1, 0.3, 0.5)
"""Of high priority."""
URGENT_SHARE, URGENT_HIGH_SHARE = 0.05, 0.15
"""With a third class, which has the high one's headroom then; the high one may have more load."""
POLICIES: tuple[PolicyName, ...] = ("meshift", "llumnix", "llumnix-base")
BLIND = "meshift, blind"
"""The same requests, all of normal priority, and told apart only in the figures."""
NAMES: Mapping[str, PolicyName] = {policy: policy for policy in POLICY_NAMES}
BASES = {"meshift": BLIND, "llumnix": "llumnix-base"}
"""With what each is compared: itself with all priorities equal."""
CLASSES = {0: "normal", 1: "high", 2: "urgent"}
KEYS = ("cv", "high_share", "urgent_share", "reading", "policy")
COLUMNS = ("prefill_mean_s", "prefill_p99_s", "decode_mean_ms", "decode_p99_ms", "e2e_mean_s", "e2e_p99_s")


@dataclass(frozen=True, slots=True)
class Case:
    """One workload."""

    cv: float
    high_share: float
    urgent_share: float = 0.0


QUICK_CASES = (Case(4.0, SHARES[0]),)
CASES = (
    *(Case(cv, SHARES[0]) for cv in CVS),
    *(Case(4.0, share) for share in SHARES[1:]),
    Case(4.0, URGENT_HIGH_SHARE, URGENT_SHARE),
)


def run(settings: ExperimentSettings, cluster: Cluster) -> Runs:
    """Bursts of growing size with a tenth of high priority; then greater shares, and three classes. Both readings of
    the headroom."""
    ways: list[str] = []
    for policy in settings.policies or (("meshift",) if settings.quick else POLICIES):
        ways += [policy, BLIND] if policy == "meshift" else [policy]
    count = 2 if settings.quick else settings.seeds
    cases = QUICK_CASES if settings.quick else CASES
    runs = Runs(
        "priority", cluster.parameters_hash(), settings.json_path, {"requests": settings.requests}, settings.resume
    )
    readings = [cluster, *([] if settings.quick else [_with_usage(cluster, reading="reservation")])]
    tasks = [
        _task(reading, settings.requests, case, seed, way)
        for seed in range(settings.first_seed, settings.first_seed + count)
        for case in cases
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
        if (line["high_share"], line["urgent_share"]) == (SHARES[0], 0.0):
            for column in ("prefill_mean_s", "decode_mean_ms"):
                gain = line.get(f"high_{column}_gain")
                if gain is not None:
                    name = f"{line['policy']}, {column.partition('_')[0]}"
                    series.setdefault(f"{name} ({line['reading'][0]})", []).append((line["cv"], gain))
    return series


def _with_usage(cluster: Cluster, **changes: Any) -> Cluster:
    return cluster.model_copy(update={"usage": cluster.usage.model_copy(update=changes)})


def _task(cluster: Cluster, requests: int, case: Case, seed: int, policy: str) -> Task:
    reading = cluster.usage.reading
    columns = {**asdict(case), "reading": reading, "seed": seed, "policy": policy}
    work = partial(_run, cluster, requests, case, seed, policy)
    shares = f"{case.high_share:.0%}" + (f" and {case.urgent_share:.0%} urgent" if case.urgent_share else "")
    return Task(f"CV {case.cv:g} {shares} {reading} seed {seed} {policy}", columns, work)


def _run(cluster: Cluster, requests: int, case: Case, seed: int, policy: str) -> Result:
    workload = Workload(trace=TRACE, requests=requests, rate=RATE, seed=seed, cv=case.cv)
    shares = {2: case.urgent_share, 1: case.high_share}
    arrivals = with_priorities(workload.arrivals(cluster.tokens_max), shares, seed)
    sent = [replace(arrival, priority=0) for arrival in arrivals] if policy == BLIND else arrivals
    used = cluster if not case.urgent_share else _with_usage(cluster, classes=THREE_CLASSES)
    result = run_serving(used.options(NAMES.get(policy, "meshift"), seed), sent)
    outcomes: dict[int, list[Outcome]] = {priority: [] for priority in CLASSES}
    for outcome, arrival in zip(result.outcomes, arrivals, strict=True):
        outcomes[arrival.priority].append(outcome)
    named = {"trace": TRACE, "rate": RATE, **asdict(case), "seed": seed, "policy": policy}
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
    result = []
    for names in dict.fromkeys(tuple(row.get(key) for key in KEYS) for row in rows):
        case = dict(zip(KEYS, names, strict=True))
        if case["policy"] not in BASES:
            continue
        ours = {row["seed"]: row for row in rows if all(row.get(key) == case[key] for key in KEYS)}
        base_case = case | {"policy": BASES[case["policy"]]}
        base = {row["seed"]: row for row in rows if all(row.get(key) == base_case[key] for key in KEYS)}
        line: Row = dict(case)
        for name in CLASSES.values():
            for column in COLUMNS:
                key = f"{name}_{column}"
                ratios = [base[seed][key] / row[key] for seed, row in ours.items() if seed in base and row.get(key)]
                if ratios:
                    line[f"{key}_gain"] = median(ratios)
        result.append(line)
    return result
