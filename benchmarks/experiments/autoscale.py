"""Llumnix's section 6.5: instances paid for against the P99 prefill, over thresholds t of the range [t, t + 50] of
decode steps in reserve, and, for our own rule, over the load of memory that is aimed at. All policies go through the
same points, and of each only those count that no other undercuts in both: so each is compared at its best."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from math import log
from statistics import fmean, geometric_mean, median

from meshift.benchmarks.experiments.charts import Points, draw
from meshift.benchmarks.experiments.oracle import oracle
from meshift.benchmarks.experiments.runs import Result, Row, Runs, figures, print_rows, samples
from meshift.benchmarks.experiments.settings import ExperimentSettings
from meshift.benchmarks.experiments.tasks import Task, carry_out
from meshift.services.scheduler.policy.settings import (
    CALM_STARTS,
    PolicyName,
    PolicySettings,
    ScalingFigure,
    ScalingSettings,
)
from meshift.services.simulation.scenario import Cluster, Workload
from meshift.services.simulation.serving_run import run_serving

TRACE = "L-L"
INSTANCES, INSTANCES_MAX = 8, 16
"""It begins in the middle: the P99 of a short run would else be that of the first minute."""
POISSON = ((2.0, 1.0), (2.5, 1.0), (3.0, 1.0))
BURSTS = ((2.0, 2.0), (2.0, 4.0), (2.0, 6.0))
"""Requests/s, and the coefficient of variation of their gaps."""
CALM_S = 60.0
"""What isn't wanted for so long is spare, or, at other points, by the default, for twice as long as a start takes. The
first is better for whom a drain takes until the last request ends, the second for whom it takes seconds."""
Point = tuple[float, float | None]
"""A threshold, and `calm_s` where that is set."""
POINTS: Mapping[ScalingFigure, Sequence[Point]] = {
    "ratio": ((10.0, None), (100.0, None), (300.0, None), (600.0, None)),
    "load": ((0.7, None), (0.85, None), (1.0, None), (1.2, None), (0.7, CALM_S), (0.9, CALM_S), (1.1, CALM_S)),
}
QUICK_POINTS: Mapping[ScalingFigure, Sequence[Point]] = {
    "ratio": ((10.0, None), (300.0, None)),
    "load": ((0.7, None), (0.9, None), (1.1, None)),
}
WIDTH = 50.0
COLD_STARTS_S = (0.0, 30.0, 180.0)
POLICIES: tuple[PolicyName, ...] = ("meshift", "llumnix", "infaas++")
BASELINE = "infaas++"
PUBLISHED: ScalingFigure = "ratio"
TARGETS_S = (2.0, 3.0, 5.0, 10.0, 20.0, 40.0, 80.0)
"""P99s at which policies are compared (the paper's: 5 s)."""
DECODE_TARGETS_MS = (75.0, 100.0, 125.0, 150.0, 175.0, 200.0, 250.0, 300.0, 400.0)
"""P99s of the time a token, preemptions in it, which the time to the first token doesn't show."""
PAID, PAID_TIME = "instances_paid_mean", "instance_s_per_request"
"""A run lasts until its last request ends: of two that pay for as much, the longer one has the lower mean."""
SAME_RULE: Mapping[str, tuple[str, str, Sequence[float]]] = {
    "saving_at_equal_p99": (PAID, "prefill_p99_s", TARGETS_S),
    "saving_of_instance_time_at_equal_p99": (PAID_TIME, "prefill_p99_s", TARGETS_S),
    "saving_at_equal_decode_p99": (PAID, "decode_p99_ms", DECODE_TARGETS_MS),
    "saving_at_equal_waited_p99": (PAID, "waited_p99_s", TARGETS_S),
}
"""Savings against the baseline under the same rule: of which cost, at which P99, and where that is compared."""
SAVINGS = (*SAME_RULE, "saving_at_no_greater_p99", "saving_at_equal_p99_against_published")
MEASURED = (
    "instances_paid_mean",
    "instance_s_per_request",
    "prefill_p99_s",
    "prefill_mean_s",
    "decode_p99_ms",
    "e2e_mean_s",
    "waited_p99_s",
    "preemption_loss_s_mean",
)
QUICK_REQUESTS_MAX = 2_000


@dataclass(frozen=True, slots=True)
class Case:
    """One run."""

    rate: float
    cv: float
    figure: ScalingFigure
    threshold: float
    """Decode steps below which one is started, or the load that is aimed at."""
    calm_s: float | None
    cold_start_s: float
    seed: int
    policy: PolicyName


def cases(settings: ExperimentSettings) -> list[Case]:
    """All runs, seed by seed."""
    loads = ((2.5, 1.0),) if settings.quick else POISSON + BURSTS
    points = QUICK_POINTS if settings.quick else POINTS
    colds = settings.cold_starts_s or ((30.0,) if settings.quick else COLD_STARTS_S)
    count = 1 if settings.quick else settings.seeds
    return [
        Case(rate, cv, figure, threshold, calm_s, cold, seed, policy)
        for seed in range(settings.first_seed, settings.first_seed + count)
        for rate, cv in loads
        for cold in colds
        for figure, thresholds in points.items()
        for threshold, calm_s in thresholds
        if calm_s != CALM_STARTS * cold
        for policy in settings.policies or POLICIES
    ]


def run(settings: ExperimentSettings, cluster: Cluster) -> Runs:
    """1 to 16 instances; INFaaS++ scales by the same rule and moves nothing, also when one drains."""
    requests = min(settings.requests, QUICK_REQUESTS_MAX) if settings.quick else settings.requests
    runs = Runs("autoscale", cluster.parameters_hash(), settings.json_path, {"requests": requests}, settings.resume)
    matrix = cases(settings)
    carry_out([_task(case, cluster, requests) for case in matrix], runs, settings.processes)
    columns = ("rate", "cv", "cold_start_s", "figure", "threshold", "calm_s", "policy", "seed", *MEASURED)
    colds = dict.fromkeys(row["cold_start_s"] for row in runs.rows)
    told = [curves(runs.rows, cold) | {"cold_start_s": cold} for cold in colds]
    bound = bounds(matrix, cluster, requests)
    runs.conclude([{name: row[name] for name in columns} for row in runs.rows], {"cold_starts": told, "oracle": bound})
    print_rows(runs.summary)
    print_rows(bound)
    for line in told:
        print(f"cold start {line['cold_start_s']:g} s: saving at equal P99 {line['saving_at_equal_p99']}")
        for name in SAVINGS[1:]:
            print(f"  {name.replace('_', ' ')} {line[name]}")
    series = {f"{name}, {line['cold_start_s']:g} s": points for line in told for name, points in line["curve"].items()}
    draw(settings.json_path, "Instances paid for", "P99 prefill, s", "instances, mean", series)
    return runs


def bounds(matrix: Sequence[Case], cluster: Cluster, requests: int) -> list[Row]:
    """What an oracle pays for at each load, mean of the seeds: no policy can do with less."""
    told = []
    for rate, cv in dict.fromkeys((case.rate, case.cv) for case in matrix):
        seeds = dict.fromkeys(case.seed for case in matrix if (case.rate, case.cv) == (rate, cv))
        paid = []
        for seed in seeds:
            arrivals = _workload(rate, cv, seed, requests).arrivals(cluster.tokens_max)
            run = oracle(arrivals, cluster.engine, INSTANCES_MAX)
            paid.append((run.instances_mean, run.instance_s / len(arrivals)))
        means = (fmean(instances for instances, _ in paid), fmean(time_s for _, time_s in paid))
        told.append({"rate": rate, "cv": cv, PAID: means[0], PAID_TIME: means[1]})
    return told


def _workload(rate: float, cv: float, seed: int, requests: int) -> Workload:
    return Workload(trace=TRACE, requests=requests, rate=rate, seed=seed, cv=cv)


def curves(rows: Sequence[Row], cold_start_s: float) -> Row:
    """Of each policy and rule of scaling, P99 prefill and instances paid for by threshold; and what share of the
    instances of INFaaS++ each saves: under the same rule, and against INFaaS++ under the published one. A saving is
    read load by load, as a mean of P99s is that of the worst load, and then the median is taken."""
    mine = [row for row in rows if row["cold_start_s"] == cold_start_s]
    loads = []
    for rate, cv in dict.fromkeys((row["rate"], row["cv"]) for row in mine):
        here = [row for row in mine if (row["rate"], row["cv"]) == (rate, cv)]
        loads.append({"rate": rate, "cv": cv, "curve": _curve(here, PAID)} | _savings(here))
    told: Row = {"curve": _curve(mine, PAID), "loads": loads}
    for name in SAVINGS:
        keys = dict.fromkeys(key for load in loads for key in load[name])
        told[name] = {key: _median([load[name].get(key) for load in loads]) for key in keys}
    return told


def _curve(rows: Sequence[Row], cost: str, p99: str = "prefill_p99_s") -> dict[str, list[tuple[float, float]]]:
    """By policy and rule: at each point of the sweep the geometric mean of the P99s, and the mean of the cost."""
    by_point: dict[tuple[str, float, float | None], list[Row]] = {}
    for row in rows:
        key = (f"{row['policy']}, {row['figure']}", row["threshold"], row["calm_s"])
        by_point.setdefault(key, []).append(row)
    curve: dict[str, list[tuple[float, float]]] = {}
    for (name, *_), here in by_point.items():
        mean = geometric_mean(row[p99] for row in here)
        curve.setdefault(name, []).append((mean, fmean(row[cost] for row in here)))
    return curve


def _savings(rows: Sequence[Row]) -> Row:
    told: Row = {name: {} for name in SAVINGS}
    for name, (cost, p99, targets) in SAME_RULE.items():
        curve = _curve(rows, cost, p99)
        for key, figure in _compared(curve):
            told[name][key] = saving_at_equal_p99(curve[key], curve.get(f"{BASELINE}, {figure}", []), targets)
    curve = _curve(rows, PAID)
    for key, figure in _compared(curve):
        same, published = (curve.get(f"{BASELINE}, {rule}", []) for rule in (figure, PUBLISHED))
        told["saving_at_no_greater_p99"][key] = saving_at_no_greater_p99(curve[key], same)
        told["saving_at_equal_p99_against_published"][key] = saving_at_equal_p99(curve[key], published)
    return told


def _compared(curve: Mapping[str, Points]) -> list[tuple[str, str]]:
    """The names of the curves that aren't the baseline's, and their rules of scaling."""
    names = [(name, *name.split(", ")) for name in curve]
    return [(name, rule) for name, policy, rule in names if policy != BASELINE]


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def frontier(points: Points) -> list[tuple[float, float]]:
    """Those of (P99 prefill, instances) than which no other is as good in both, by P99 ascending: what a policy can do,
    without the thresholds that serve it badly."""
    best: list[tuple[float, float]] = []
    for p99_s, instances in sorted(points):
        if not best or instances < best[-1][1]:
            best.append((p99_s, instances))
    return best


def instances_at(points: Points, p99_s: float) -> float | None:
    """On the frontier at that P99; between its points along the logarithm of the P99. None: beyond its ends."""
    best = frontier(points)
    for (low_s, more), (high_s, fewer) in pairwise(best):
        if low_s <= p99_s <= high_s:
            return more + (fewer - more) * log(p99_s / low_s) / log(high_s / low_s)
    return None


def saving_at_equal_p99(ours: Points, theirs: Points, targets: Sequence[float] = TARGETS_S) -> float | None:
    """The median over those of `targets` that lie on both frontiers. None: there are none."""
    savings = []
    for target in targets:
        needed, paid = instances_at(ours, target), instances_at(theirs, target)
        if needed is not None and paid is not None:
            savings.append(1 - needed / paid)
    return median(savings) if savings else None


def saving_at_no_greater_p99(ours: Points, theirs: Points) -> float | None:
    """The median over the points of the frontier of `theirs` to which `ours` has one with no greater P99, of which it
    is the one with the fewest instances. Also where the two have no P99 in common. None: there are none."""
    savings = []
    for p99_s, instances in frontier(theirs):
        enough = [ours_instances for ours_s, ours_instances in ours if ours_s <= p99_s]
        if enough:
            savings.append(1 - min(enough) / instances)
    return median(savings) if savings else None


def _task(case: Case, cluster: Cluster, requests: int) -> Task:
    point = f"{case.figure} {case.threshold:g}" + ("" if case.calm_s is None else f" calm {case.calm_s:g} s")
    name = f"{case.rate:g}/s CV {case.cv:g} {point} seed {case.seed} {case.policy}, cold start {case.cold_start_s:g} s"
    return Task(name, asdict(case), partial(_run, case, cluster, requests))


def _run(case: Case, cluster: Cluster, requests: int) -> Result:
    limits = ScalingSettings(enabled=True, figure=case.figure, instances_min=1, instances_max=INSTANCES_MAX)
    rule: dict[str, float | None] = {"load": case.threshold, "calm_s": case.calm_s}
    if case.figure != "load":
        rule = {"low": case.threshold, "high": case.threshold + WIDTH}
    scaling = limits.model_copy(update=rule)
    engine = cluster.engine.model_copy(update={"cold_start_ns": round(case.cold_start_s * 1e9)})
    scheduling = PolicySettings.model_validate(cluster.scheduling.model_dump() | {"scaling": scaling.model_dump()})
    elastic = cluster.model_copy(update={"engine": engine, "scheduling": scheduling, "instances": INSTANCES})
    workload = _workload(case.rate, case.cv, case.seed, requests)
    result = run_serving(elastic.options(case.policy, case.seed), workload.arrivals(cluster.tokens_max))
    measures = result.measures()
    row = {
        "trace": TRACE,
        "rate": case.rate,
        "cv": case.cv,
        "figure": case.figure,
        "threshold": case.threshold,
        "calm_s": case.calm_s,
        "cold_start_s": case.cold_start_s,
        "seed": case.seed,
        "policy": case.policy,
        "instances_paid_mean": result.instances_paid_mean,
        "instance_s_per_request": result.instances_paid_mean * measures.virtual_s / len(result.outcomes),
        **figures(measures),
    }
    return row, samples(result)
