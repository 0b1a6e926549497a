"""PipeLive's section 7.4: what it is worth that KV memory grows with a change of the layout, on PatternShift.

A two-stage pipeline, the first stage on an A100 (80 GB, 2.0 TB/s, 312 TFLOP/s), the second on an L40S (48 GB,
0.86 TB/s, 362 TFLOP/s), serves a model of 70 billion parameters in 80 layers, in 8 bits a weight (in 16 it fits into
neither split), KV in 16 bits for 8 heads of 128. The workload is prefill-heavy first, for which the layers lie as the
compute does, and then decode-heavy, for which they go to where the memory bandwidth is. Where they lay before, the
second stage has room for little KV, and all stages have the same: without resizing, the second half has that, too.

A rate is sustained if the P99 of the time to the first token stays below `TTFT_S`."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from meshift.backends.sim.parameters import SimParameters
from meshift.backends.sim.pipeline import SimPipeline, SimStage
from meshift.benchmarks.experiments.runs import Result, Row, Runs, print_rows
from meshift.benchmarks.experiments.settings import ExperimentSettings
from meshift.benchmarks.experiments.tasks import Task, carry_out
from meshift.schemas import subjects
from meshift.schemas.instances import ModelInfo
from meshift.schemas.layouts import LayoutFlags
from meshift.schemas.reconfiguring import ReconfigureBody, ReconfigureOrder, ReconfigureReport
from meshift.services.bus.base import ServiceInfo
from meshift.services.bus.memory import MemoryBus, Mode
from meshift.services.simulation import virtual_time
from meshift.services.simulation.clients import Client, Outcome, make_request
from meshift.services.simulation.measures import prefill_s
from meshift.services.simulation.mesh import MeshOptions, SimulatedMesh
from meshift.services.simulation.scenario import Cluster
from meshift.services.simulation.serving_run import CLIENT_DEADLINE_S, SWEEP_FRONTEND
from meshift.services.simulation.workload import pattern_shift

ModeName = Literal["resize", "no-resize", "static"]
MODES: tuple[ModeName, ...] = ("resize", "no-resize", "static")

LAYERS = 80
PREFILL_SPLIT, DECODE_SPLIT = (36, 44), (56, 24)
"""The nearest to 312:362 and to 2.0:0.86 in groups of four."""

LAYER_BYTES = 875_000_000
KV_LAYER_BYTES = 2 * 8 * 128 * 2
RESERVE_BYTES = 1_500_000_000
"""Of each stage, for embeddings and activations."""
USABLE_SHARE = 0.9
GPUS = ((80e9, 1.0, 1.0), (48e9, 0.86 / 2.0, 362 / 312))
"""Memory; bandwidth and compute relative to the first."""

MODEL = ModelInfo(name="sim", context_tokens_max=16_384, vocabulary_size=32_000, layers=LAYERS)
TTFT_S = 5.0
RATES = tuple(step / 4 for step in range(2, 41))
QUICK_RATES = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
REQUESTS = (200, 1_000)
"""As in the paper, and so many that what queues shows."""


@dataclass(frozen=True, slots=True)
class Run:
    """One."""

    mode: ModeName
    rate: float
    requests: int
    seed: int


def parameters() -> SimParameters:
    """Of the whole model on the first GPU: a decode step reads all weights and all KV; prefills run at half of the peak
    compute. Capacity: what the prefill-heavy split has."""
    memory = pipeline(PREFILL_SPLIT).stages
    room = min(
        (stage.memory_bytes or 0) - stage.reserve_bytes - layers * LAYER_BYTES
        for stage, layers in zip(memory[1:], PREFILL_SPLIT[1:], strict=True)
    )
    bandwidth = 2.0e12
    return SimParameters(
        capacity=int(room / (PREFILL_SPLIT[1] * KV_LAYER_BYTES)),
        decode_step_ns=round(LAYERS * LAYER_BYTES / bandwidth * 1e9),
        decode_request_ns=50_000,
        decode_token_ns=round(LAYERS * KV_LAYER_BYTES / bandwidth * 1e9),
        prefill_token_ns=round(2 * 70e9 / (0.5 * 312e12) * 1e9),
        prefill_token_squared_ns=0,
        kv_token_bytes=LAYERS * KV_LAYER_BYTES,
    )


def pipeline(layers: tuple[int, ...]) -> SimPipeline:
    """Both GPUs, at 8 GB/s from the host and 10 GB/s between them."""
    stages = tuple(
        SimStage(
            memory_bytes=round(USABLE_SHARE * memory),
            reserve_bytes=RESERVE_BYTES,
            decode_speed=decode,
            prefill_speed=prefill,
        )
        for memory, decode, prefill in GPUS
    )
    return SimPipeline(
        layers=layers,
        stages=stages,
        layer_weight_bytes=LAYER_BYTES,
        load_bytes_per_s=8_000_000_000,
        copy_bytes_per_s=10_000_000_000,
        capacity_max=1_000_000,
    )


def run(settings: ExperimentSettings, cluster: Cluster) -> Runs:
    """Each mode at rising rates, until one isn't sustained."""
    rates = QUICK_RATES if settings.quick else RATES
    asked = {"rates": list(rates)}
    runs = Runs("resizing", parameters().parameters_hash(), settings.json_path, asked, settings.resume)
    seeds = range(settings.first_seed, settings.first_seed + (1 if settings.quick else min(settings.seeds, 3)))
    counts = REQUESTS[:1] if settings.quick else REQUESTS
    tasks = [
        Task(
            f"{requests} requests, seed {seed}, {mode}",
            {"requests": requests, "seed": seed, "mode": mode},
            partial(_climb, mode, rates, requests, seed),
        )
        for requests in counts
        for seed in seeds
        for mode in MODES
    ]
    carry_out(tasks, runs, settings.processes)
    runs.conclude(summarise(runs.rows))
    print_rows(runs.summary)
    return runs


def summarise(rows: Sequence[Row]) -> list[Row]:
    """The greatest rate that each mode sustained."""
    summary = []
    for requests, seed in dict.fromkeys((row["requests"], row["seed"]) for row in rows):
        mine = [row for row in rows if (row["requests"], row["seed"]) == (requests, seed) and _is_sustained(row)]
        sustained: dict[str, float] = {
            mode: max((row["rate"] for row in mine if row["mode"] == mode), default=0.0) for mode in MODES
        }
        ratio = ratio_of(sustained["resize"], sustained["no-resize"])
        summary.append({"requests": requests, "seed": seed, **sustained, "ratio": ratio})
    return summary


def _is_sustained(row: Row) -> bool:
    return bool(row["prefill_p99_s"] <= TTFT_S)


def ratio_of(rate: float, other: float) -> float | None:
    """None where the other sustains nothing."""
    return round(rate / other, 2) if other else None


def _climb(mode: ModeName, rates: tuple[float, ...], requests: int, seed: int) -> list[Result]:
    """Up to the first rate that isn't sustained."""
    results = []
    for rate in rates:
        results.append(measure(Run(mode, rate, requests, seed)))
        if not _is_sustained(results[-1][0]):
            break
    return results


def measure(wanted: Run) -> Result:
    """What the clients of one run saw, and the raw times."""
    outcomes, capacity, report = virtual_time.run(_serve(wanted))
    times = sorted(prefill_s(outcome) for outcome in outcomes)
    last_s = max(outcome.last_s or 0.0 for outcome in outcomes)
    row: Row = {
        "mode": wanted.mode,
        "rate": wanted.rate,
        "requests": wanted.requests,
        "seed": wanted.seed,
        "prefill_p50_s": times[len(times) // 2],
        "prefill_p99_s": times[int(0.99 * (len(times) - 1))],
        "tokens_per_s": sum(len(outcome.tokens) for outcome in outcomes) / last_s,
        "preempted_share": sum(bool(o.finish and o.finish.preemptions) for o in outcomes) / len(outcomes),
        "capacity_tokens": capacity,
        "change_s": None if report is None else round(report.duration_s, 3),
        "stop_ms_max": None if report is None or report.change is None else max(report.change.stop_ns) / 1e6,
    }
    return row, {"prefill_s": [round(prefill_s(outcome), 4) for outcome in outcomes]}


async def _serve(wanted: Run) -> tuple[list[Outcome], int, ReconfigureReport | None]:
    mesh = SimulatedMesh(
        MeshOptions(
            instances=1,
            seed=wanted.seed,
            bus_mode=Mode.DIRECT,
            parameters=parameters(),
            model=MODEL,
            pipeline=pipeline(PREFILL_SPLIT),
            skip_steps=True,
            emit="edges",
            frontend=SWEEP_FRONTEND,
        )
    )
    await mesh.start()
    loop, rng = asyncio.get_running_loop(), random.Random(f"prompts/{wanted.seed}")
    arrivals, begin_s = pattern_shift(wanted.requests, wanted.rate, wanted.seed), loop.time()
    change: asyncio.Task[ReconfigureReport] | None = None
    tasks = []
    for number, arrival in enumerate(arrivals):
        await asyncio.sleep(max(0.0, begin_s + arrival.arrival_s - loop.time()))
        if 2 * number >= wanted.requests and change is None and wanted.mode != "static":
            change = loop.create_task(_reshape(mesh, LayoutFlags(no_resize=wanted.mode == "no-resize")))
        client = Client(mesh, mesh.frontend_names[0], retry_s=1.0)
        tasks.append(loop.create_task(client.run(make_request(arrival, MODEL.name, rng), CLIENT_DEADLINE_S)))
    outcomes = [await task for task in tasks]
    report = None if change is None else await change
    assert report is None or str(report.outcome) == "committed", report
    capacity = mesh.workers["worker-0"].engine.load().capacity
    await mesh.stop()
    return outcomes, capacity, report


async def _reshape(mesh: SimulatedMesh, flags: LayoutFlags) -> ReconfigureReport:
    bus = MemoryBus(mesh.network, "operator")
    await bus.start(ServiceInfo("operator", "operator"))
    body = ReconfigureBody(layers=DECODE_SPLIT, flags=flags, wait=True)
    order = ReconfigureOrder(instance_id="worker-0", body=body)
    report = await bus.request(subjects.RECONFIGURE, order, ReconfigureReport, timeout_s=300.0)
    await bus.close()
    return report
