"""`meshift bench`: runs a benchmark by name."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass

from meshift.services.cli.errors import EXIT_USAGE, CommandError


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark: `main(arguments)` of a module, which prints what it measured and returns an exit status."""

    module: str
    summary: str


BENCHMARKS: dict[str, Benchmark] = {
    "simulation": Benchmark("meshift.benchmarks.simulation", "what the simulator costs: 16 instances, 10,000 requests"),
    "simulate": Benchmark("meshift.benchmarks.simulate", "policies on a simulated cluster: latencies, fragmentation"),
    "failover": Benchmark("meshift.benchmarks.failover", "kill -9 of a worker and of the scheduler under real streams"),
    "bus": Benchmark("meshift.benchmarks.bus", "the typed bus against bare nats-py"),
    "tracing": Benchmark(
        "meshift.benchmarks.tracing", "what tracing costs: requests a second and CPU, off, on, sampled"
    ),
    "kv": Benchmark("meshift.benchmarks.kv", "KV memory: utilisation by stacking, compaction, memory given back"),
    "attention": Benchmark("meshift.benchmarks.attention", "attention on a CPU at long contexts: SGLang's and ours"),
    "overhead": Benchmark("meshift.benchmarks.overhead", "the mesh with one worker against a bare SGLang server"),
    "rebalance": Benchmark(
        "meshift.benchmarks.rebalance", "a skewed burst on two workers, with moves and without, by turns"
    ),
    "fidelity": Benchmark("meshift.benchmarks.fidelity", "how well a fitted simulator predicts a real run here"),
    "reconfigure": Benchmark("meshift.benchmarks.reconfigure", "layers moved between stages under load, in all modes"),
    "move": Benchmark("meshift.benchmarks.move", "a request moved between two workers: live, blocking, recomputed"),
}
"""By name. A new benchmark adds itself here, and nowhere else."""


def main(name: str, arguments: list[str]) -> int:
    """Run the named benchmark; without a name, all of them with their defaults."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(help_text(BENCHMARKS))
        return 0
    if not arguments:
        return run_all(BENCHMARKS)
    benchmark = BENCHMARKS.get(arguments[0])
    if benchmark is None:
        raise CommandError(f"no benchmark {arguments[0]!r}\n\n{help_text(BENCHMARKS)}", EXIT_USAGE)
    return run(benchmark, arguments[1:])


def run(benchmark: Benchmark, arguments: list[str]) -> int:
    """Run one benchmark."""
    return int(importlib.import_module(benchmark.module).main(arguments))


def run_all(benchmarks: Mapping[str, Benchmark]) -> int:
    """Run each with its defaults; the exit status is that of the first that failed."""
    if not benchmarks:
        print("there is no benchmark yet")
    failed = 0
    for name, benchmark in benchmarks.items():
        print(f"== {name}: {benchmark.summary}", flush=True)
        failed = run(benchmark, []) or failed
    return failed


def help_text(benchmarks: Mapping[str, Benchmark]) -> str:
    """What `meshift bench --help` prints."""
    rows = [f"  {name:<16}  {benchmark.summary}" for name, benchmark in benchmarks.items()]
    return "\n".join(["usage: meshift bench [NAME [options]]", "", *(rows or ["  (there is no benchmark yet)"])])
