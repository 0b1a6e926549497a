"""Llumnix's section 6.6: what scheduling itself costs, for many instances and requests, against a scheduler that has
every request at every step. CPU time of the decisions alone, without messages (`control_plane` has those), for one
second of a cluster's life: below one second of CPU a single process keeps up."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshift.benchmarks.experiments import control_plane
from meshift.benchmarks.experiments.charts import Series, draw
from meshift.benchmarks.experiments.runs import Row, Runs, print_rows, progress
from meshift.benchmarks.experiments.settings import ExperimentSettings
from meshift.schemas.identity import Owner
from meshift.schemas.instances import InstanceState, LoadReport, ModelInfo
from meshift.services.scheduler.charges import Charges
from meshift.services.scheduler.dispatching import DispatchIndexes
from meshift.services.scheduler.policy.central import CentralScheduler
from meshift.services.scheduler.policy.dispatch import choose_instance
from meshift.services.scheduler.policy.observation import InstanceObservation
from meshift.services.scheduler.policy.pairing import pair_instances
from meshift.services.scheduler.policy.settings import PolicyName, PolicySettings
from meshift.services.simulation.scenario import Cluster

SIZES = ((64, 500), (256, 2_500), (1_024, 10_000))
"""Instances, and requests a second."""
POLICIES: tuple[PolicyName, ...] = ("meshift", "llumnix", "infaas++", "round-robin")
REPORTS_A_SECOND = 10
STEPS_A_SECOND = 25
BATCH = 32
PROMPT_TOKENS = 128
OUTPUT_TOKENS = 128
PAGE_TOKENS = 16
MODEL = ModelInfo(name="m", context_tokens_max=16_384, vocabulary_size=32_000, layers=32)


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU time. `other_s`: of rounds of pairs, or of steps."""

    dispatch_s: float
    dispatches: int
    other_s: float
    others: int

    def row(self) -> Row:
        """Per dispatch and per round or step, and both together."""
        return {
            "dispatch_us": 1e6 * self.dispatch_s / self.dispatches,
            "round_or_step_us": 1e6 * self.other_s / max(1, self.others),
            "cpu_s_per_s": self.dispatch_s + self.other_s,
        }


@dataclass(frozen=True, slots=True)
class Size:
    """A cluster and its load."""

    instances: int
    rate: int
    capacity: int


def run(settings: ExperimentSettings, cluster: Cluster) -> Runs:
    """Each size and way, several times: the least of the CPU times is told, all are kept. Then over real NATS."""
    sizes = [Size(*size, cluster.tokens_max) for size in SIZES]
    repetitions = 2 if settings.quick else 5
    measured = ways(settings.policies or POLICIES)
    runs = Runs("scalability", cluster.parameters_hash(), settings.json_path)
    with progress(len(sizes) * len(measured)) as begin:
        for size in sizes:
            for name, measure in measured.items():
                begin(f"{size.instances} instances {name}")
                costs = [measure(size, seed) for seed in range(repetitions)]
                best = min(costs, key=lambda cost: cost.dispatch_s + cost.other_s)
                row = {"instances": size.instances, "rate": size.rate, "policy": name, **best.row()}
                runs.add(row, {"costs": [cost.row() for cost in costs]})
    runs.conclude(list(runs.rows))
    print_rows(runs.summary)
    draw(settings.json_path, "What one dispatch costs", "instances", "CPU time, us", chart(runs.rows))
    if settings.over_nats:
        for row in control_plane.measure(settings):
            runs.add(row, {})
    return runs


def ways(policies: Sequence[PolicyName]) -> dict[str, Callable[[Size, int], Cost]]:
    """By name: the policies by index, `meshift` looking at every instance, and the centralized scheduler."""
    named: dict[str, Callable[[Size, int], Cost]] = {}
    for policy in policies:
        named[policy] = lambda size, seed, policy=policy: _by_index(size, seed, policy)  # type: ignore[misc]
    named["meshift, plain scan"] = _by_scan
    named["central"] = _central
    return named


def chart(rows: Sequence[Row]) -> Series:
    """Of each way, the cost of a dispatch over instances."""
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        series.setdefault(row["policy"], []).append((row["instances"], row["dispatch_us"]))
    return series


class _Cluster:
    """Instances that report anew, one after another, evenly between the dispatches."""

    def __init__(self, size: Size, seed: int) -> None:
        rng = random.Random(seed)
        rounds = [[_report(rng, index, size.capacity) for index in range(size.instances)] for _ in range(3)]
        self.observed = {report.owner: InstanceObservation(report) for report in rounds[0]}
        self.charges = Charges()
        self.reports = [report for reports in rounds for report in reports]
        self._next = 0

    def report(self, count: int) -> list[Owner]:
        """So many report."""
        owners = []
        for _ in range(count):
            report = self.reports[self._next % len(self.reports)]
            self._next += 1
            self.charges.on_report(report.owner)
            self.observed[report.owner] = InstanceObservation(report)
            owners.append(report.owner)
        return owners

    def observe(self, owner: Owner) -> InstanceObservation:
        """As the scheduler service does."""
        return InstanceObservation(self.observed[owner].report, *self.charges.charged(owner))

    def all(self) -> list[InstanceObservation]:
        """In the order of their names."""
        return [self.observe(owner) for owner in self.observed]


def _by_index(size: Size, seed: int, policy: PolicyName) -> Cost:
    """What the scheduler service does. Bringing the index up to date after reports is part of the dispatches."""
    settings = PolicySettings(policy=policy)
    cluster = _Cluster(size, seed)
    indexes = DispatchIndexes(lambda model: cluster.all(), cluster.observe)
    indexes.choose(MODEL.name, PROMPT_TOKENS, 0, settings, may_wait=True)

    def dispatch(changed: Sequence[Owner], turn: int) -> None:
        for owner in changed:
            indexes.changed(owner)
        decision = indexes.choose(MODEL.name, PROMPT_TOKENS, turn, settings, may_wait=True)
        if decision is not None and decision.owner is not None:
            cluster.charges.charge(decision.owner, PROMPT_TOKENS)
            indexes.changed(decision.owner)

    return _a_second(size, settings, cluster, dispatch)


def _by_scan(size: Size, seed: int) -> Cost:
    """A tenth of the dispatches: each looks at every instance."""
    settings = PolicySettings()
    cluster = _Cluster(size, seed)

    def dispatch(changed: Sequence[Owner], turn: int) -> None:
        decision = choose_instance(cluster.all(), PROMPT_TOKENS, turn, settings)
        if decision is not None and decision.owner is not None:
            cluster.charges.charge(decision.owner, PROMPT_TOKENS)

    cost = _a_second(Size(size.instances, size.rate // 10, size.capacity), settings, cluster, dispatch)
    return Cost(10 * cost.dispatch_s, 10 * cost.dispatches, cost.other_s, cost.others)


def _a_second(
    size: Size, settings: PolicySettings, cluster: _Cluster, dispatch: Callable[[Sequence[Owner], int], None]
) -> Cost:
    """Its reports, dispatches and rounds of pairs."""
    due, dispatch_s, round_s = 0.0, 0.0, 0.0
    rounds = REPORTS_A_SECOND if settings.moves else 0
    for turn in range(size.rate):
        due += size.instances * REPORTS_A_SECOND / size.rate
        changed = cluster.report(int(due))
        due -= int(due)
        begin_s = time.process_time()
        dispatch(changed, turn)
        dispatch_s += time.process_time() - begin_s
        if settings.moves and turn % max(1, size.rate // REPORTS_A_SECOND) == 0:
            begin_s = time.process_time()
            pair_instances(cluster.all(), settings, 0.0, {})
            round_s += time.process_time() - begin_s
    return Cost(dispatch_s, size.rate, round_s, rounds)


def _report(rng: random.Random, index: int, capacity: int) -> LoadReport:
    """Of an instance with any load; every eighth one has a queue."""
    used = rng.randrange(capacity)
    waiting = rng.randrange(1, 4) if rng.random() < 1 / 8 else 0
    demand = rng.randrange(1, 2_000) if waiting else 0
    return LoadReport(
        owner=Owner(f"i{index:04}", 1),
        sequence=1,
        emitted_ns=0,
        state=InstanceState.READY,
        model=MODEL,
        capacity=capacity,
        used=used,
        cached=0,
        free=capacity - used,
        reserved=0,
        running=rng.randrange(1, BATCH),
        waiting=waiting,
        head_demand=demand,
        queued_demand=demand * waiting,
    )


def _central(size: Size, seed: int) -> Cost:
    """The same dispatches, and every step of every instance, with as many requests in its batch as keep it so."""
    rng = random.Random(seed)
    owners = [Owner(f"i{index:04}", 1) for index in range(size.instances)]
    central = CentralScheduler(owners, size.capacity // PAGE_TOKENS, PAGE_TOKENS)
    for number in range(size.instances * BATCH):
        central.dispatch(f"old{number}", PROMPT_TOKENS)
    batches = {owner: list(central.on_step(owner, ()).admitted) for owner in owners}
    dispatch_s, step_s = 0.0, 0.0
    for turn in range(STEPS_A_SECOND):
        begin_s = time.process_time()
        for number in range(size.rate // STEPS_A_SECOND):
            central.dispatch(f"r{turn}-{number}", PROMPT_TOKENS)
        dispatch_s += time.process_time() - begin_s
        begin_s = time.process_time()
        for owner in owners:
            batch = batches[owner]
            over = max(0, len(batch) - BATCH)
            ended = [batch.pop(rng.randrange(len(batch))) for _ in range(over)]
            batch.extend(central.on_step(owner, ended).admitted)
        step_s += time.process_time() - begin_s
    dispatches = size.rate // STEPS_A_SECOND * STEPS_A_SECOND
    return Cost(dispatch_s, dispatches, step_s, STEPS_A_SECOND * size.instances)
