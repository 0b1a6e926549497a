"""One virtual-time run of 16 instances and 10,000 S-S requests: what the simulator itself costs."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import Field

from meshift.benchmarks.report import BenchmarkSettings, percentile, print_table, write_result
from meshift.services.cli.settings import parse_settings
from meshift.services.simulation.mesh import MeshOptions
from meshift.services.simulation.serving_run import ServingResult, run_serving, skipped, stepwise
from meshift.services.simulation.workload import Arrival, generate

WAYS: dict[str, Callable[[MeshOptions], MeshOptions]] = {"skipped": skipped, "stepwise": stepwise}


class SimulationSettings(BenchmarkSettings):
    """Run the whole simulated mesh with equal steps skipped, and with one validated message a step."""

    instances: int = Field(16, ge=1, description="instances")
    requests: int = Field(10_000, ge=1, description="requests (--quick: a tenth)")
    trace: str = Field("S-S", description="lengths of inputs and outputs: S, M or L each")
    rate: float = Field(35.0, gt=0, description="requests a second")
    seed: int = Field(0, description="of arrivals, lengths and prompts")


def main(arguments: Sequence[str]) -> int:
    """Run it."""
    settings = parse_settings(SimulationSettings, "meshift bench simulation", arguments)
    count = max(1, settings.requests // 10) if settings.quick else settings.requests
    arrivals = generate(settings.trace, count, settings.rate, settings.seed)
    options = MeshOptions(instances=settings.instances, seed=settings.seed)
    runs = {name: measure(way(options), arrivals) for name, way in WAYS.items()}
    digests = {result.digest() for result, _ in runs.values()}
    result: dict[str, Any] = {f"{name}_cpu_s": round(cpu_s, 2) for name, (_, cpu_s) in runs.items()}
    fast = runs["skipped"][0]
    result |= {
        "requests": count,
        "virtual_s": round(fast.virtual_s, 1),
        "steps": fast.steps,
        "same_digest": len(digests) == 1,
        "digest": fast.digest(),
    }
    print_table([(key, str(value)) for key, value in result.items()])
    samples = [{"way": name, "cpu_s": cpu_s, "digest": run.digest()} for name, (run, cpu_s) in runs.items()]
    write_result(settings.json_path, result, samples)
    print(f"prefill P50 {percentile(prefill_s(fast), 0.5):.3f} s, P99 {percentile(prefill_s(fast), 0.99):.3f} s")
    return 0 if len(digests) == 1 else 1


def measure(options: MeshOptions, arrivals: list[Arrival]) -> tuple[ServingResult, float]:
    """The result, and the CPU seconds it took."""
    begin_s = time.process_time()
    result = run_serving(options, arrivals)
    return result, time.process_time() - begin_s


def prefill_s(result: ServingResult) -> list[float]:
    """Arrival to first token, of each request."""
    return [outcome.first_s - outcome.arrival_s for outcome in result.outcomes if outcome.first_s is not None]
