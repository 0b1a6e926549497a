"""Llumnix's section 6.5: instances paid for against the P99 prefill, over thresholds t of the range [t, t + 50] of
decode steps in reserve, and, for our own rule, over the load of memory that is aimed at."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from statistics import fmean, median

from meshift.benchmarks.experiments.charts import Points, draw
from meshift.benchmarks.experiments.runs import Result, Row, Runs, figures, print_rows, samples
from meshift.benchmarks.experiments.settings import ExperimentSettings
from meshift.benchmarks.experiments.tasks import Task, carry_out
from meshift.services.scheduler.policy.settings import PolicyName, PolicySettings, ScalingFigure, ScalingSettings
from meshift.services.simulation.scenario import Cluster, Workload
from meshift.services.simulation.serving_run import run_serving

TRACE = "L-L"
INSTANCES, INSTANCES_MAX = 8, 16
"""It begins in the middle: the P99 of a short run would else be that of the first minute."""
POISSON = ((2.0, 1.0), (2.5, 1.0), (3.0, 1.0))
BURSTS = ((2.0, 2.0), (2.0, 4.0), (2.0, 6.0))
"""Requests/s, and the coefficient of variation of their gaps."""
POINTS: Mapping[ScalingFigure, Sequence[float]] = {"ratio": (5.0, 10.0, 20.0, 40.0), "load": (0.5, 0.6, 0.7, 0.8, 0.9)}
QUICK_POINTS: Mapping[ScalingFigure, Sequence[float]] = {"ratio": (10.0,), "load": (0.5, 0.7, 0.9)}
WIDTH = 50.0
COLD_STARTS_S = (0.0, 30.0, 180.0)
POLICIES: tuple[PolicyName, ...] = ("meshift", "llumnix", "infaas++")
BASELINE = "infaas++"
MEASURED = ("instances_paid_mean", "prefill_p99_s", "prefill_mean_s", "decode_p99_ms", "e2e_mean_s")
QUICK_REQUESTS_MAX = 2_000


@dataclass(frozen=True, slots=True)
class Case:
    """One run."""

    rate: float
    cv: float
    figure: ScalingFigure
    threshold: float
    """Decode steps below which one is started, or the load that is aimed at."""
    cold_start_s: float
    seed: int
    policy: PolicyName


def cases(settings: ExperimentSettings) -> list[Case]:
    """All runs, seed by seed."""
    loads = ((2.5, 1.0),) if settings.quick else POISSON + BURSTS
    points = QUICK_POINTS if settings.quick else POINTS
    colds = (30.0,) if settings.quick else COLD_STARTS_S
    count = 1 if settings.quick else settings.seeds
    return [
        Case(rate, cv, figure, threshold, cold, seed, policy)
        for seed in range(settings.first_seed, settings.first_seed + count)
        for rate, cv in loads
        for cold in colds
        for figure, thresholds in points.items()
        for threshold in thresholds
        for policy in settings.policies or POLICIES
    ]


def run(settings: ExperimentSettings, cluster: Cluster) -> Runs:
    """1 to 16 instances; INFaaS++ scales by the same rule and moves nothing, also when one drains."""
    requests = min(settings.requests, QUICK_REQUESTS_MAX) if settings.quick else settings.requests
    runs = Runs("autoscale", cluster.parameters_hash(), settings.json_path, {"requests": requests}, settings.resume)
    carry_out([_task(case, cluster, requests) for case in cases(settings)], runs, settings.processes)
    columns = ("rate", "cv", "cold_start_s", "figure", "threshold", "policy", "seed", *MEASURED)
    colds = dict.fromkeys(row["cold_start_s"] for row in runs.rows)
    told = [curves(runs.rows, cold) | {"cold_start_s": cold} for cold in colds]
    runs.conclude([{name: row[name] for name in columns} for row in runs.rows], {"cold_starts": told})
    print_rows(runs.summary)
    for line in told:
        print(f"cold start {line['cold_start_s']:g} s: saving at equal P99 {line['saving_at_equal_p99']}")
        print(f"  where ours is no greater {line['saving_at_no_greater_p99']}")
    series = {f"{name}, {line['cold_start_s']:g} s": points for line in told for name, points in line["curve"].items()}
    draw(settings.json_path, "Instances paid for", "P99 prefill, s", "instances, mean", series)
    return runs


def curves(rows: Sequence[Row], cold_start_s: float) -> Row:
    """Of each policy and rule of scaling, P99 prefill and instances paid for by threshold, over all loads and seeds;
    and what share of the instances of INFaaS++ under the same rule each saves."""
    mine = [row for row in rows if row["cold_start_s"] == cold_start_s]
    curve: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for policy, figure, threshold in dict.fromkeys((row["policy"], row["figure"], row["threshold"]) for row in mine):
        here = [row for row in mine if (row["policy"], row["figure"], row["threshold"]) == (policy, figure, threshold)]
        point = (fmean(row["prefill_p99_s"] for row in here), fmean(row["instances_paid_mean"] for row in here))
        curve.setdefault((policy, figure), []).append(point)
    told: Row = {"curve": {", ".join(key): points for key, points in curve.items()}}
    for name, saving in (("equal", saving_at_equal_p99), ("no_greater", saving_at_no_greater_p99)):
        told[f"saving_at_{name}_p99"] = {
            ", ".join(key): saving(points, curve.get((BASELINE, key[1]), []))
            for key, points in curve.items()
            if key[0] != BASELINE
        }
    return told


def saving_at_equal_p99(ours: Points, theirs: Points) -> float | None:
    """The median over those points of `theirs` (P99 prefill, instances) whose P99 lies within that of `ours`, which is
    interpolated between its points. None: there are none."""
    ordered = sorted(ours)
    savings = []
    for p99_s, instances in theirs:
        for (low_s, first), (high_s, second) in pairwise(ordered):
            if low_s <= p99_s <= high_s and high_s > low_s:
                needed = first + (second - first) * (p99_s - low_s) / (high_s - low_s)
                savings.append(1 - needed / instances)
                break
    return median(savings) if savings else None


def saving_at_no_greater_p99(ours: Points, theirs: Points) -> float | None:
    """The median over those points of `theirs` to which `ours` has one with no greater P99, of which it is the one with
    the fewest instances. Also where the two have no P99 in common. None: there are none."""
    savings = []
    for p99_s, instances in theirs:
        enough = [ours_instances for ours_s, ours_instances in ours if ours_s <= p99_s]
        if enough:
            savings.append(1 - min(enough) / instances)
    return median(savings) if savings else None


def _task(case: Case, cluster: Cluster, requests: int) -> Task:
    name = f"{case.rate:g}/s CV {case.cv:g} {case.figure} {case.threshold:g} seed {case.seed} {case.policy}"
    return Task(f"{name}, cold start {case.cold_start_s:g} s", asdict(case), partial(_run, case, cluster, requests))


def _run(case: Case, cluster: Cluster, requests: int) -> Result:
    limits = ScalingSettings(enabled=True, figure=case.figure, instances_min=1, instances_max=INSTANCES_MAX)
    rule = {"load": case.threshold}
    if case.figure != "load":
        rule = {"low": case.threshold, "high": case.threshold + WIDTH}
    scaling = limits.model_copy(update=rule)
    engine = cluster.engine.model_copy(update={"cold_start_ns": round(case.cold_start_s * 1e9)})
    scheduling = PolicySettings.model_validate(cluster.scheduling.model_dump() | {"scaling": scaling.model_dump()})
    elastic = cluster.model_copy(update={"engine": engine, "scheduling": scheduling, "instances": INSTANCES})
    workload = Workload(trace=TRACE, requests=requests, rate=case.rate, seed=case.seed, cv=case.cv)
    result = run_serving(elastic.options(case.policy, case.seed), workload.arrivals(cluster.tokens_max))
    row = {
        "trace": TRACE,
        "rate": case.rate,
        "cv": case.cv,
        "figure": case.figure,
        "threshold": case.threshold,
        "cold_start_s": case.cold_start_s,
        "seed": case.seed,
        "policy": case.policy,
        "instances_paid_mean": result.instances_paid_mean,
        **figures(result.measures()),
    }
    return row, samples(result)
