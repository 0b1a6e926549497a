"""Llumnix's section 6.6: what scheduling itself costs, for many instances and requests, against a scheduler that tracks
every request at every step. CPU time of the decisions alone, without messages, for one second of a cluster's life:
below one second of CPU a single process keeps up."""

import random
import time
from collections.abc import Callable

from meshift.benchmarks.experiments.runs import Row, Runs, print_rows, progress
from meshift.benchmarks.experiments.settings import ExperimentSettings
from meshift.schemas.identity import Owner
from meshift.schemas.instances import InstanceState, LoadReport, ModelInfo
from meshift.services.scheduler.charges import Charges
from meshift.services.scheduler.policy.central import CentralTracker, TrackedInstance
from meshift.services.scheduler.policy.dispatch import choose_instance
from meshift.services.scheduler.policy.observation import InstanceObservation
from meshift.services.scheduler.policy.pairing import pair_instances
from meshift.services.scheduler.policy.settings import PolicySettings
from meshift.services.simulation.scenario import Cluster

SIZES = ((64, 500), (256, 2_500), (1_024, 10_000))
"""Instances, and requests a second."""
REPORTS_A_SECOND = 10
STEPS_A_SECOND = 25
BATCH = 32
OUTPUT_TOKENS = 128
MODEL = ModelInfo(name="m", context_tokens_max=16_384, vocabulary_size=32_000, layers=32)


def run(settings: ExperimentSettings, cluster: Cluster) -> Runs:
    """Each size and way, several times; the least of the CPU times is told, all are kept."""
    sizes = SIZES[:2] if settings.quick else SIZES
    repetitions = 2 if settings.quick else 3
    ways: dict[str, Callable[[int, int, int, int], float]] = {"global": _global, "central": _central}
    runs = Runs("scalability", cluster.parameters_hash(), settings.json_path)
    with progress(len(sizes) * len(ways)) as begin:
        for instances, rate in sizes:
            for name, measure in ways.items():
                begin(f"{instances} instances {name}")
                capacity = cluster.tokens_max
                times = [measure(instances, rate, seed, capacity) for seed in range(repetitions)]
                row = {"instances": instances, "rate": rate, "policy": name, "cpu_s_per_s": min(times)}
                runs.add(row, {"cpu_s": times})
    runs.conclude(summarise(runs.rows))
    print_rows(runs.summary)
    return runs


def summarise(rows: list[Row]) -> list[Row]:
    """Both ways side by side."""
    by_size: dict[tuple[int, int], dict[str, float]] = {}
    for row in rows:
        by_size.setdefault((row["instances"], row["rate"]), {})[row["policy"]] = row["cpu_s_per_s"]
    return [
        {"instances": size[0], "rate": size[1], **times, "central / global": times["central"] / times["global"]}
        for size, times in by_size.items()
    ]


def _global(instances: int, rate: int, seed: int, capacity: int) -> float:
    """Dispatches over reports, and a round of pairs ten times a second, as the scheduler service makes them."""
    rng = random.Random(seed)
    settings = PolicySettings()
    rounds = [[_report(rng, index, capacity) for index in range(instances)] for _ in range(REPORTS_A_SECOND)]
    charges, turn = Charges(), 0
    begin_s = time.process_time()
    for reports in rounds:
        for report in reports:
            charges.on_report(report.owner)
        for _ in range(rate // REPORTS_A_SECOND):
            observations = [InstanceObservation(report, *charges.charged(report.owner)) for report in reports]
            decision = choose_instance(observations, 128, turn, settings)
            turn += 1
            if decision is not None and decision.owner is not None:
                charges.charge(decision.owner, 128)
        pair_instances([InstanceObservation(report) for report in reports], settings, 0.0, {})
    return time.process_time() - begin_s


def _report(rng: random.Random, index: int, capacity: int) -> LoadReport:
    used = rng.randrange(capacity)
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
        waiting=0,
        head_demand=0,
        queued_demand=0,
    )


def _central(instances: int, rate: int, seed: int, capacity: int) -> float:
    """The same dispatches, and every step of every instance with the tokens of its batch."""
    owners = [Owner(f"i{index:04}", 1) for index in range(instances)]
    tracker = CentralTracker(TrackedInstance(owner, capacity) for owner in owners)
    batches: dict[Owner, list[str]] = {owner: [] for owner in owners}
    number = 0
    for _ in range(instances * BATCH):
        batches[tracker.dispatch(f"old{number}", 128 + number % OUTPUT_TOKENS)].append(f"old{number}")
        number += 1
    rng = random.Random(seed)
    begin_s = time.process_time()
    for _ in range(STEPS_A_SECOND):
        for _ in range(rate // STEPS_A_SECOND):
            number += 1
            batches[tracker.dispatch(f"r{number}", 128)].append(f"r{number}")
        for owner in owners:
            batch = batches[owner]
            ended = [batch.pop(rng.randrange(len(batch)))] if len(batch) > BATCH else []
            tracker.on_step(owner, batch, ended)
    return time.process_time() - begin_s
