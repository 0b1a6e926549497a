"""Finds the request rates of the serving matrix and writes `benchmarks/experiments/rates.json`.

For each trace and target: the rate at which INFaaS++ has that P99 prefill in the median of the seeds. By halving; runs
are kept in a file, so that a search that is broken off goes on where it was. It takes minutes to hours of CPU time.

    .venv/bin/python scripts/find_rates.py --traces M-M --seeds 0 1 2 3 4 5 6 7 --runs results/rates.jsonl
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from meshift.benchmarks.experiments.rates import FILE, TARGETS_S
from meshift.services.simulation.scenario import Cluster, Workload
from meshift.services.simulation.serving_run import run_serving

START = {
    "S-S": (30.0, 45.0), "M-M": (6.5, 9.5), "L-L": (2.0, 4.0), "S-L": (3.0, 6.0), "L-S": (8.0, 24.0),
    "sharegpt": (5.0, 12.0), "burstgpt": (5.0, 12.0),
}  # fmt: skip
"""Where the paper swept (section 6.1), widened."""
PRECISION = 0.01
"""Relative: the search ends when the bounds are as close as this."""


@dataclass
class Search:
    """Runs by (trace, rate, seed): P99 prefill, s."""

    requests: int
    seeds: Sequence[int]
    path: Path | None
    cluster: Cluster = field(default_factory=Cluster)
    known: dict[tuple[str, float, int], float] = field(default_factory=dict)

    def load(self) -> None:
        """What earlier searches have found out."""
        if self.path is None or not self.path.exists():
            return
        for line in self.path.read_text().splitlines():
            trace, rate, seed, requests, p99_s = json.loads(line)
            if requests == self.requests:
                self.known[trace, rate, seed] = p99_s

    def p99_s(self, trace: str, rate: float, seed: int) -> float:
        """One run, unless it is known."""
        key = (trace, rate, seed)
        if key not in self.known:
            workload = Workload(trace=trace, requests=self.requests, rate=rate, seed=seed, shuffle=True)
            result = run_serving(self.cluster.options("infaas++", seed), workload.arrivals(self.cluster.tokens_max))
            self.known[key] = result.measures().prefill_s.p99
            self._keep(key)
        return self.known[key]

    def exceeds(self, trace: str, rate: float, target_s: float) -> bool:
        """Whether the median over the seeds is above the target; ends as soon as a majority has decided."""
        half = len(self.seeds) / 2
        above = below = 0
        for seed in self.seeds:
            if self.p99_s(trace, rate, seed) > target_s:
                above += 1
            else:
                below += 1
            if above > half or below > half:
                break
        if above == below:
            return median(self.p99_s(trace, rate, seed) for seed in self.seeds) > target_s
        return above > below

    def find(self, trace: str, target_s: float, low: float, high: float) -> float:
        """The rate, between two of which the lower is expected not to exceed the target and the higher to."""
        while (high - low) / low > PRECISION:
            middle = round((low + high) / 2, 3)
            if self.exceeds(trace, middle, target_s):
                high = middle
            else:
                low = middle
        return round((low + high) / 2, 3)

    def _keep(self, key: tuple[str, float, int]) -> None:
        trace, rate, seed = key
        line = json.dumps([trace, rate, seed, self.requests, self.known[key]])
        print(line, flush=True)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(line + "\n")


def main() -> int:
    """Find them and write the file."""
    parser = argparse.ArgumentParser(description="Find the rates of the serving matrix.")
    parser.add_argument("--traces", nargs="+", default=list(START))
    parser.add_argument("--targets", nargs="+", type=int, default=list(TARGETS_S))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(8)))
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--bounds", nargs=2, type=float, help="of the rate, for a trace from a file")
    parser.add_argument("--runs", type=Path, help="where runs are kept")
    given = parser.parse_args()
    search = Search(given.requests, given.seeds, given.runs)
    search.load()
    told = json.loads(FILE.read_text()) if FILE.exists() else {"rates": {}, "seeds": {}}
    told["parameters_hash"] = search.cluster.engine.parameters_hash()
    for trace in given.traces:
        for target_s in given.targets:
            low, high = given.bounds or START[trace]
            rate = search.find(trace, target_s, low, high)
            told["rates"].setdefault(Path(trace).name, {})[str(target_s)] = rate
            told["seeds"][Path(trace).name] = list(given.seeds)
            FILE.write_text(json.dumps(told, indent=1, sort_keys=True) + "\n")
            print(f"{trace}: P99 prefill of {target_s} s at {rate} requests/s", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
