"""How well the simulator, fitted to this machine, predicts what a real mesh does on it.

A mesh of real engines is measured as `meshift calibrate` does it, and then serves generated requests at some share of
what it can, whose clients are the simulator's own: the same class asks the same frontend core, over real NATS. Then it
is measured again: the model is fitted to both together, and how much slower the second was is told, since a machine
that others share may be half as fast again some minutes later. The simulator then serves the same requests by the
fitted model, and what clients saw is compared: time to the first token, time a token, end to end. The model is fitted
to batches and prompts that are alone; the run mixes them.

The bounds were laid down before anything was measured: 15% at P50, 25% at P99.
"""

import asyncio
import os
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

from pydantic import Field

from meshift.backends.sim.parameters import SimParameters
from meshift.benchmarks.cpu_time import cpu_s, machine_cpu_s
from meshift.benchmarks.experiments.runs import print_rows
from meshift.benchmarks.experiments.settings import FIRST_REPORTED_SEED
from meshift.benchmarks.mesh_process import running_mesh
from meshift.benchmarks.report import BenchmarkSettings, percentile, write_result
from meshift.schemas.identity import FrontendRef
from meshift.services.calibration.file import Calibration
from meshift.services.calibration.measuring import Sample, decode_points, evaluate, prefill_points
from meshift.services.calibration.targets import parse_target
from meshift.services.cli.calibrate import CalibrateSettings, report, take_samples
from meshift.services.cli.client import joined_bus
from meshift.services.cli.errors import EXIT_ERROR, CommandError
from meshift.services.cli.model import resolve_model
from meshift.services.cli.settings import parse_settings
from meshift.services.frontend.core import FrontendCore, FrontendOptions
from meshift.services.process import ServiceSettings, connect_bus, new_incarnation
from meshift.services.simulation.clients import Client, Outcome, make_request
from meshift.services.simulation.lengths import GENERATED
from meshift.services.simulation.measures import decode_ms, end_to_end_s, prefill_s
from meshift.services.simulation.scenario import Cluster
from meshift.services.simulation.serving_run import run_serving
from meshift.services.simulation.workload import Arrival, fitting, generate

FRONTEND = "fidelity"
INSTANCE = "worker-1"
TARGETS = (parse_target("high=1.2x"),)
BOUNDS = {0.5: 0.15, 0.99: 0.25}
"""Percentile -> the relative error that is allowed."""

QUICK_REQUESTS, QUICK_REQUESTS_MIN, QUICK_SPAN_S = 40, 12, 50.0
"""A slow machine gets fewer requests, so that they have come in about that time."""
KNOWN_S_MAX = 10.0
REQUEST_S_MAX = 300.0
TYPICAL_BATCH = 8
"""Requests at once, by which a rate is guessed that the mesh can keep up with."""

Row = dict[str, Any]
Figure = Callable[[Outcome], float]
FIGURES: Mapping[str, Figure] = {"prefill_s": prefill_s, "decode_ms": decode_ms, "e2e_s": end_to_end_s}


class FidelitySettings(BenchmarkSettings):
    """Measure real workers, serve a small trace with them, and simulate the same."""

    model: str = Field("smollm2", description="a prepared model's name, or a folder")
    engine: Literal["sglang", "sim"] = Field("sglang", description="sim: only to try the benchmark itself")
    workers: int = Field(1, ge=1, description="instances")
    capacity_tokens: int = Field(8192, ge=512, description="KV cache of a worker")
    threads: int | None = Field(None, ge=1, description="of each worker; without it, the cores divided by the workers")
    trace: str = Field("S-S", description="a generated trace (S-S, M-M, sharegpt, ...)")
    requests: int = Field(100, ge=5, description="of each run (--quick: 40 at most)")
    loads: tuple[float, ...] = Field((0.4, 0.8), description="shares of the guessed capacity (--quick: the first)")
    first_seed: int = Field(FIRST_REPORTED_SEED, description="of the first run; each has its own")


@dataclass(frozen=True, slots=True)
class RealRun:
    """What a real mesh did with some requests."""

    load: float
    rate: float
    seed: int
    arrivals: tuple[Arrival, ...]
    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """All that the real mesh was there for."""

    calibration: Calibration
    runs: tuple[RealRun, ...]
    others_cores: float
    drift: float
    """How many times as long the same work took after the runs as before them, in the median."""


class OneFrontend:
    """A mesh, as its clients see it."""

    def __init__(self, core: FrontendCore) -> None:
        self.frontends = {FRONTEND: core}


def main(arguments: Sequence[str]) -> int:
    """Run it. That the prediction misses its bounds is said, and no error."""
    settings = parse_settings(FidelitySettings, "meshift bench fidelity", arguments)
    if settings.trace not in GENERATED:
        raise CommandError(f"--trace {settings.trace} is none of {', '.join(GENERATED)}", EXIT_ERROR)
    model = resolve_model(settings.model)
    with tempfile.TemporaryDirectory() as folder:
        measured = asyncio.run(_measure(settings, model, Path(folder)))
    print(report(measured.calibration))
    rows, samples = [], []
    for run in measured.runs:
        simulated = simulate(settings, measured.calibration.parameters, run)
        rows += compare(run, simulated)
        samples += [_sample(run, "real", run.outcomes), _sample(run, "simulated", simulated)]
    result = {
        "settings": settings.model_dump(mode="json", exclude={"json_path"}),
        "others_cores": measured.others_cores,
        "drift": measured.drift,
        "calibration": measured.calibration.model_dump(mode="json"),
        "rows": rows,
        "within": all(row["within"] for row in rows),
    }
    write_result(settings.json_path, result, samples)
    print_rows(rows)
    print(verdict(rows, measured.others_cores, measured.drift))
    return 0


async def _measure(settings: FidelitySettings, model: Path, folder: Path) -> Measured:
    threads = settings.threads or max(1, len(os.sched_getaffinity(0)) // settings.workers)
    worker_settings = {
        "MESHIFT_ENGINE": settings.engine,
        "MESHIFT_PREFIX_CACHE": "false",
        "MESHIFT_CAPACITY_TOKENS": str(settings.capacity_tokens),
        "MESHIFT_THREADS_PER_RANK": str(threads),
    }
    print(f"starting {settings.workers} x {model.name}...", flush=True)
    up = ("--workers", str(settings.workers), "--model", str(model))
    async with running_mesh(folder / "mesh", *up, settings=worker_settings) as process:
        nats_url = process.state().nats_url
        busy_s, begin_s = machine_cpu_s() - cpu_s(os.getpid()), asyncio.get_running_loop().time()
        print("calibrating...", flush=True)
        before, after = (CalibrateSettings(out=folder / f"{name}.json", quick=settings.quick) for name in "ab")
        async with joined_bus(nats_url) as bus:
            subject, samples = await take_samples(bus, INSTANCE, before)
            guessed = evaluate(samples, subject, TARGETS).parameters
            runs = await _serve_all(settings, guessed, nats_url, model.name)
            print("calibrating again...", flush=True)
            _, again = await take_samples(bus, INSTANCE, after)
        others_s = machine_cpu_s() - cpu_s(os.getpid()) - busy_s
        passed_s = asyncio.get_running_loop().time() - begin_s
    calibration = evaluate([*samples, *again], subject, TARGETS)
    return Measured(calibration, tuple(runs), others_s / passed_s, drift_of(samples, again))


def drift_of(before: Sequence[Sample], after: Sequence[Sample]) -> float:
    """The median over what was measured of how many times as long it took."""
    return median(later / earlier for earlier, later in zip(_times_ns(before), _times_ns(after), strict=True))


def _times_ns(samples: Sequence[Sample]) -> list[float]:
    prefills = [point.duration_ns for point in prefill_points(samples)]
    return [*(point.step_ns for point in decode_points(samples)), *prefills]


async def _serve_all(settings: FidelitySettings, parameters: SimParameters, nats_url: str, model: str) -> list[RealRun]:
    core = FrontendCore(
        FrontendRef(frontend_id=FRONTEND, incarnation=new_incarnation()),
        connect_bus(ServiceSettings(nats=nats_url), FRONTEND),
        FrontendOptions(),
    )
    await core.start()
    runs = []
    try:
        async with asyncio.timeout(KNOWN_S_MAX):
            while len(core.instances()) < settings.workers:
                await asyncio.sleep(0.05)
        for number, load in enumerate(settings.loads[:1] if settings.quick else settings.loads):
            run = planned(settings, parameters, load, settings.first_seed + number)
            print(f"{len(run.arrivals)} requests at {run.rate:.2f}/s ({load:.0%} of the guessed capacity)", flush=True)
            runs.append(RealRun(load, run.rate, run.seed, run.arrivals, tuple(await _serve(core, run, model))))
    finally:
        await core.stop()
    return runs


async def _serve(core: FrontendCore, run: RealRun, model: str) -> list[Outcome]:
    loop, rng, mesh = asyncio.get_running_loop(), random.Random(f"prompts/{run.seed}"), OneFrontend(core)
    asks = [make_request(arrival, model, rng) for arrival in run.arrivals]
    begin_s = loop.time()
    tasks = []
    for arrival, ask in zip(run.arrivals, asks, strict=True):
        await asyncio.sleep(max(0.0, begin_s + arrival.arrival_s - loop.time()))
        tasks.append(loop.create_task(Client(mesh, FRONTEND, retry_s=1.0).run(ask, REQUEST_S_MAX)))
    return [await task for task in tasks]


# ---- what follows needs no mesh


def planned(settings: FidelitySettings, parameters: SimParameters, load: float, seed: int) -> RealRun:
    """The requests of a run."""
    lengths = fitting(generate(settings.trace, settings.requests, 1.0, seed), parameters.capacity)
    rate = load * settings.workers * sustainable_rate(parameters, lengths)
    count = settings.requests
    if settings.quick:
        count = min(count, QUICK_REQUESTS, max(QUICK_REQUESTS_MIN, round(rate * QUICK_SPAN_S)))
    arrivals = fitting(generate(settings.trace, count, rate, seed), parameters.capacity)
    return RealRun(load, rate, seed, tuple(arrivals), ())


def sustainable_rate(parameters: SimParameters, arrivals: Sequence[Arrival]) -> float:
    """Requests a second that one instance can about keep up with: what it takes to prefill one, and its share of the
    decode steps of a typical batch."""
    inputs, outputs = fmean(item.input_tokens for item in arrivals), fmean(item.output_tokens for item in arrivals)
    tokens = round(TYPICAL_BATCH * (inputs + outputs / 2))
    step_ns = parameters.step_cost(copying=False).step_ns(TYPICAL_BATCH, tokens)
    return 1e9 / (parameters.prefill_ns(round(inputs), round(inputs) ** 2) + outputs * step_ns / TYPICAL_BATCH)


def simulate(settings: FidelitySettings, parameters: SimParameters, run: RealRun) -> tuple[Outcome, ...]:
    """The same requests, by the fitted model."""
    cluster = Cluster(instances=settings.workers, engine=parameters)
    return run_serving(cluster.options("meshift", run.seed), list(run.arrivals)).outcomes


def compare(run: RealRun, simulated: Sequence[Outcome]) -> list[Row]:
    """Each figure at each percentile."""
    rows = []
    for name, figure in FIGURES.items():
        for share, bound in BOUNDS.items():
            real, predicted = _percentile(run.outcomes, figure, share), _percentile(simulated, figure, share)
            error = predicted / real - 1
            rows.append(
                {
                    "load": run.load,
                    "rate": run.rate,
                    "seed": run.seed,
                    "figure": name,
                    "percentile": round(100 * share),
                    "real": real,
                    "simulated": predicted,
                    "error": error,
                    "bound": bound,
                    "within": abs(error) <= bound,
                }
            )
    return rows


def _percentile(outcomes: Sequence[Outcome], figure: Figure, share: float) -> float:
    return percentile([figure(outcome) for outcome in outcomes if len(outcome.tokens) > 1], share)


def _sample(run: RealRun, who: str, outcomes: Sequence[Outcome]) -> Row:
    served = [(arrival.input_tokens, arrival.output_tokens) for arrival in run.arrivals]
    own = {"run": who, "load": run.load, "rate": run.rate, "seed": run.seed, "lengths": served}
    return {**own, **columns_of_outcomes(outcomes)}


def columns_of_outcomes(outcomes: Sequence[Outcome]) -> Row:
    """What each request saw, from the first arrival on."""
    first_s = min(outcome.arrival_s for outcome in outcomes)
    return {
        "arrival_s": [round(outcome.arrival_s - first_s, 6) for outcome in outcomes],
        **{
            name: [round(figure(outcome), 6) if len(outcome.tokens) > 1 else None for outcome in outcomes]
            for name, figure in FIGURES.items()
        },
        "owners": [outcome.owners for outcome in outcomes],
    }


def verdict(rows: Sequence[Row], others_cores: float, drift: float) -> str:
    """In words."""
    outside = [f"{row['figure']} P{row['percentile']} at {row['load']:.0%}" for row in rows if not row["within"]]
    said = f"outside the bounds: {', '.join(outside)}" if outside else "all figures are within the bounds"
    said += f"; the same work took {drift:.2f} times as long afterwards"
    return said + (f"; others used {others_cores:.2f} cores meanwhile" if others_cores > 0.1 else "")
