"""Everything at once: long prompts among short ones, three classes, bursts, a rate that swings, and scaling. What it
is for is not latency but trouble: requests that move to and fro, instances that stay overloaded, classes that miss what
they were promised. Beside the policies two readings of Llumnix's text that it leaves open (section 4.4.2)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from statistics import fmean

from meshift.backends.sim.parameters import SimParameters
from meshift.benchmarks.experiments.charts import draw
from meshift.benchmarks.experiments.runs import Result, Row, Runs, figures, print_rows, samples
from meshift.benchmarks.experiments.settings import ExperimentSettings
from meshift.benchmarks.experiments.tasks import Task, carry_out
from meshift.services.scheduler.policy.settings import PolicyName
from meshift.services.simulation.arrivals import SinusoidalRate
from meshift.services.simulation.clients import Outcome
from meshift.services.simulation.measures import decode_ms, prefill_s
from meshift.services.simulation.scenario import Cluster
from meshift.services.simulation.serving_run import ServingResult, run_serving
from meshift.services.simulation.workload import Arrival, fitting, generate, with_priorities
from meshift.services.worker.policy.virtual_usage import PriorityClass, VirtualUsageSettings

TRACE = "M-M"
RATE, SWING, PERIOD_S = 5.0, 0.6, 400.0
CV = 4.0
LONG_SHARE, LONG_TIMES = 0.1, 5
INSTANCES, INSTANCES_MIN, INSTANCES_MAX = 8, 2, 16
COLD_START_S = 30.0
GRADUAL_S = 5.0
QUICK_REQUESTS_MAX = 2_000


@dataclass(frozen=True, slots=True)
class Promise:
    """What a class is promised."""

    priority_class: PriorityClass
    share: float
    """Of the requests."""
    queueing_s: float
    """Longest time to the first token beyond what the prompt takes alone."""
    token_ms: float
    """Longest time a token."""


PROMISES: Mapping[int, Promise] = {
    2: Promise(PriorityClass(name="urgent", execution=2, target_load=1_600), 0.05, 1.0, 60.0),
    1: Promise(PriorityClass(name="high", execution=1, target_load=6_400), 0.15, 5.0, 100.0),
    0: Promise(PriorityClass(name="normal", execution=0), 0.8, 15.0, 150.0),
}
"""By priority."""
CLASSES = tuple(promise.priority_class for promise in PROMISES.values())

POLICIES: tuple[PolicyName, ...] = ("meshift", "llumnix", "infaas++")
Way = tuple[str, PolicyName, Cluster]


def run(settings: ExperimentSettings, cluster: Cluster) -> Runs:
    """Each way over the seeds."""
    requests = min(settings.requests, QUICK_REQUESTS_MAX) if settings.quick else settings.requests
    seeds = range(settings.first_seed, settings.first_seed + (1 if settings.quick else settings.seeds))
    told = ways(cluster, settings.policies)
    runs = Runs("combined", cluster.parameters_hash(), settings.json_path, {"requests": requests}, settings.resume)
    tasks = [
        Task(f"seed {seed} {way[0]}", {"seed": seed, "policy": way[0]}, partial(_run, way, cluster, requests, seed))
        for seed in seeds
        for way in told
    ]
    carry_out(tasks, runs, settings.processes)
    runs.conclude(summarise(runs.rows))
    print_rows(runs.summary)
    points = {line["policy"]: [(line["instances_paid_mean"], line["violations"])] for line in runs.summary}
    draw(settings.json_path, "Promises missed", "instances paid for", "share of requests", points, lines=False)
    return runs


def _run(way: Way, cluster: Cluster, requests: int, seed: int) -> Result:
    name, policy, used = way
    result = run_serving(used.options(policy, seed), arrivals(requests, seed, cluster.tokens_max))
    return {"seed": seed, "policy": name, **row(result, cluster.engine)}, samples(result)


def arrivals(requests: int, seed: int, tokens_max: int) -> list[Arrival]:
    """The workload. Prompts that are too long for any instance once they are lengthened are left out."""
    rate = SinusoidalRate(RATE, SWING, PERIOD_S)
    plain = generate(TRACE, requests, rate, seed, CV)
    rng = Random(f"long/{seed}")
    for index in rng.sample(range(requests), round(LONG_SHARE * requests)):
        plain[index] = replace(plain[index], input_tokens=LONG_TIMES * plain[index].input_tokens)
    shares = {priority: promise.share for priority, promise in PROMISES.items() if priority}
    return with_priorities(fitting(plain, tokens_max), shares, seed)


def ways(cluster: Cluster, policies: Sequence[PolicyName]) -> list[Way]:
    """By name, with the cluster that each runs on."""
    scaling = {"enabled": True, "instances_min": INSTANCES_MIN, "instances_max": INSTANCES_MAX}
    usage = VirtualUsageSettings(classes=CLASSES)
    base = cluster.model_copy(
        update={
            "instances": INSTANCES,
            "usage": usage,
            "engine": cluster.engine.model_copy(update={"cold_start_ns": round(COLD_START_S * 1e9)}),
            "scheduling": cluster.scheduling.replaced({"scaling": scaling}),
        }
    )
    told: list[Way] = [(policy, policy, base) for policy in policies or POLICIES]
    if not policies:
        gradual = base.scheduling.replaced({"migration": {"inflate_over_s": GRADUAL_S}})
        told.append(("meshift, gradual", "meshift", base.model_copy(update={"scheduling": gradual})))
        maximum = usage.model_copy(update={"combination": "maximum"})
        published = base.scheduling.replaced({"scaling": {"figure": "ratio"}})
        told.append(("meshift, scaled as published", "meshift", base.model_copy(update={"scheduling": published})))
        told.append(("meshift, maximum", "meshift", base.model_copy(update={"usage": maximum})))
    return told


def row(result: ServingResult, engine: SimParameters) -> Row:
    """The figures of a run, and what share of each class missed its promise."""
    missed = [misses(outcome, engine) for outcome in result.outcomes]
    priorities = [outcome.request.priority.execution for outcome in result.outcomes]
    by_class = {
        f"violations_{promise.priority_class.name}": fmean(
            [miss for miss, other in zip(missed, priorities, strict=True) if other == priority] or [False]
        )
        for priority, promise in PROMISES.items()
    }
    measured = figures(result.measures())
    moves = measured["moves_per_request"] * len(missed)
    reversed_share = measured["reversed_moves"] / moves if moves else 0.0
    paid = {"instances_paid_mean": result.instances_paid_mean, "reversed_share": reversed_share}
    return {"violations": fmean(missed), **by_class, **paid, **measured}


def misses(outcome: Outcome, engine: SimParameters) -> bool:
    """Whether the promise to its class was broken."""
    promise = PROMISES[outcome.request.priority.execution]
    prompt = len(outcome.request.prompt)
    alone_s = engine.prefill_ns(prompt, prompt * prompt) / 1e9
    slow = len(outcome.tokens) > 1 and decode_ms(outcome) > promise.token_ms
    return slow or prefill_s(outcome) > alone_s + promise.queueing_s


def summarise(rows: Sequence[Row]) -> list[Row]:
    """Means over the seeds; of the longest overload the longest."""
    names = [f"violations_{promise.priority_class.name}" for promise in PROMISES.values()]
    means = ("violations", *names, "moved_often_share", "reversed_share", "moves_per_request", "instances_paid_mean")
    result = []
    for policy in dict.fromkeys(line["policy"] for line in rows):
        mine = [line for line in rows if line["policy"] == policy]
        summary: Row = {"policy": policy} | {name: fmean(line[name] for line in mine) for name in means}
        result.append(summary | {"overloaded_s_max": max(line["negative_freeness_s_max"] for line in mine)})
    return result
