"""What tracing costs: three meshes of simulated engines, with tracing off, on and sampled, asked in turn."""

import asyncio
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from pydantic import Field

from meshift.benchmarks.mesh_process import MeshProcess, running_mesh
from meshift.benchmarks.report import BenchmarkSettings, print_table, write_result
from meshift.services.cli.settings import parse_settings
from meshift.tracing.setup import TRACE_FILE_VARIABLE

REQUEST_DEADLINE_S = 120.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
SAMPLED = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.1"}


class TracingSettings(BenchmarkSettings):
    """Short chats in a closed loop against meshes of one simulated worker."""

    model: str = Field("smollm2", description="a prepared model's name, or a folder")
    rounds: int = Field(15, ge=1, description="rounds of each mesh, in turn (--quick: 6)")
    requests: int = Field(100, ge=1, description="requests in a round")
    concurrency: int = Field(16, ge=1, description="requests at once")
    output_tokens: int = Field(16, ge=1, description="length of each answer")


@dataclass
class Sample:
    """One round of one mesh."""

    way: str
    round: int
    requests_per_s: float
    cpu_ms_per_request: float
    """Of all services of that mesh. What else the machine does counts less here."""


def main(arguments: Sequence[str]) -> int:
    """Run it."""
    settings = parse_settings(TracingSettings, "meshift bench tracing", arguments)
    with tempfile.TemporaryDirectory() as folder:
        samples, spans = asyncio.run(_run(settings, Path(folder)))
    result = summary(samples) | {"spans_per_request": round(spans, 2)}
    print_table([(key, str(value)) for key, value in result.items()])
    write_result(settings.json_path, result, [vars(sample) for sample in samples])
    return 0


def ways(folder: Path) -> dict[str, Mapping[str, str]]:
    """The environment of each mesh."""
    return {
        "off": {},
        "on": {TRACE_FILE_VARIABLE: str(folder / "on.jsonl")},
        "sampled": {TRACE_FILE_VARIABLE: str(folder / "sampled.jsonl"), **SAMPLED},
    }


async def _run(settings: TracingSettings, folder: Path) -> tuple[list[Sample], float]:
    """The samples, and the spans that a request gave where tracing was on."""
    rounds = 6 if settings.quick else settings.rounds
    up = ("--engine", "sim", "--model", settings.model)
    fast = {"MESHIFT_SIM_SPEED": "100"}
    samples = []
    async with contextlib.AsyncExitStack() as stack:
        meshes = {
            name: await stack.enter_async_context(running_mesh(folder / name, *up, settings={**fast, **environment}))
            for name, environment in ways(folder).items()
        }
        rest = await stack.enter_async_context(httpx.AsyncClient(timeout=REQUEST_DEADLINE_S))
        for mesh in meshes.values():
            await chats(rest, mesh, settings)
        for number in range(rounds):
            names = list(meshes)
            # Which goes first changes, so that none gains by it.
            for name in names[number % 3 :] + names[: number % 3]:
                samples.append(await measure(rest, name, number, meshes[name], settings))
    count = sum(1 for _ in (folder / "on.jsonl").open())
    return samples, count / ((rounds + 1) * settings.requests)


async def measure(
    rest: httpx.AsyncClient, name: str, number: int, mesh: MeshProcess, settings: TracingSettings
) -> Sample:
    """One round."""
    begin_s, cpu_s = time.perf_counter(), cpu_of(mesh)
    await chats(rest, mesh, settings)
    rate = settings.requests / (time.perf_counter() - begin_s)
    return Sample(name, number, rate, 1e3 * (cpu_of(mesh) - cpu_s) / settings.requests)


async def chats(rest: httpx.AsyncClient, mesh: MeshProcess, settings: TracingSettings) -> None:
    """A closed loop of streamed chats."""
    model = settings.model.rstrip("/").rsplit("/", 1)[-1]
    message = {"role": "user", "content": "Tell me of the sea."}
    body = {"model": model, "messages": [message], "max_tokens": settings.output_tokens, "stream": True}
    url = f"{mesh.url}/v1/chat/completions"
    left = [settings.requests]

    async def client() -> None:
        while left[0]:
            left[0] -= 1
            response = await rest.post(url, json=body)
            response.raise_for_status()

    await asyncio.gather(*(client() for _ in range(settings.concurrency)))


def cpu_of(mesh: MeshProcess) -> float:
    """Seconds that the mesh's services have computed so far."""
    return sum(cpu_of_process(pid) for pid in mesh.state().pids.values())


def cpu_of_process(pid: int) -> float:
    """User and system time; fields 14 and 15 of all, after the name in parentheses."""
    fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def summary(samples: list[Sample]) -> dict[str, Any]:
    """Medians over the rounds; ratios to the mesh without tracing, round by round."""
    by_way = {way: [sample for sample in samples if sample.way == way] for way in ("off", "on", "sampled")}
    result: dict[str, Any] = {"rounds": len(by_way["off"])}
    for way, own in by_way.items():
        pairs = list(zip(own, by_way["off"], strict=True))
        result[f"{way}_requests_per_s"] = round(statistics.median(sample.requests_per_s for sample in own), 1)
        result[f"{way}_cpu_ms_per_request"] = round(statistics.median(s.cpu_ms_per_request for s in own), 2)
        if way != "off":
            ratios = [sample.requests_per_s / off.requests_per_s for sample, off in pairs]
            cpu_ratios = [sample.cpu_ms_per_request / off.cpu_ms_per_request for sample, off in pairs]
            result[f"{way}_requests_ratio"] = round(statistics.median(ratios), 3)
            result[f"{way}_requests_ratio_spread"] = [round(min(ratios), 3), round(max(ratios), 3)]
            result[f"{way}_cpu_ratio"] = round(statistics.median(cpu_ratios), 3)
    return result
