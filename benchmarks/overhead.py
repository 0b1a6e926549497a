"""What the mesh costs over a bare SGLang server: throughput at saturation, and time to first token when idle.

Both servers stay up, with equal server arguments, threads and niceness on the same cores, and take turns with equal
prompts that neither has seen. The one that waits sleeps (`--sleep-on-idle`); the CPU time that it takes nevertheless is
among the samples.

The mesh's ranks compute at a niceness that lets its sockets go first; so do the bare server's, unless
`--bare-niceness 0` asks for SGLang as it starts by itself.
"""

import asyncio
import importlib.metadata
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
from pydantic import Field

from meshift.backends.sglang.arguments import COMPUTE_NICENESS
from meshift.benchmarks.bare_sglang import running_bare_server
from meshift.benchmarks.bench_serving import Load, Phase, bench_serving
from meshift.benchmarks.cpu_parts import parts_s
from meshift.benchmarks.cpu_time import cpu_s, machine_cpu_s
from meshift.benchmarks.mesh_process import running_mesh
from meshift.benchmarks.report import BenchmarkSettings, print_table, write_result
from meshift.benchmarks.rest import stream_chat
from meshift.services.cli.model import resolve_model
from meshift.services.cli.settings import parse_settings
from meshift.services.worker.engines import EngineSettings, sglang_settings

Side = Literal["bare", "mesh"]
SIDES: tuple[Side, Side] = ("bare", "mesh")

OTHERS_CORES_MAX = 0.1
"""Both sides compute at a low priority, so on full cores others take much from them, and not always alike."""

QUICK_PAIRS = 3
QUICK_REQUESTS = 16
QUICK_FIRST_TOKEN_PAIRS = 20
WARM_UP_CHATS = 4
FIRST_TOKEN_OUTPUT_TOKENS = 4
CHAT_DEADLINE_S = 120.0
WORDS = ("sea", "lamp", "bread", "moon", "road", "winter", "clock", "dog", "river", "tall", "green", "slow", "seven")


class OverheadSettings(BenchmarkSettings):
    """Compare the mesh with one worker to a bare SGLang server with equal arguments."""

    model: str = Field("smollm2", description="a prepared model's name, or a folder")
    pairs: int = Field(5, ge=1, description="runs at saturation of each side (--quick: 3)")
    requests: int = Field(24, ge=1, description="requests of a run (--quick: 16)")
    concurrency: int = Field(8, ge=1, description="requests at once")
    input_tokens: int = Field(64, ge=1, description="length of a prompt")
    output_tokens: int = Field(32, ge=1, description="length of an answer")
    first_token_pairs: int = Field(60, ge=1, description="single requests of each side (--quick: 20)")
    bare_niceness: int = Field(COMPUTE_NICENESS, ge=0, le=19, description="of the bare server's computing processes")
    seed: int = Field(0, ge=0, description="of prompts")


@dataclass
class Samples:
    """What was measured: lines of the raw file."""

    throughput: list[dict[str, Any]] = field(default_factory=list)
    first_token: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Servers:
    """Where both sides are."""

    urls: dict[Side, str]
    pids: dict[Side, int]

    def used_s(self) -> "Used":
        """So far."""
        parts = {side: parts_s(pid) for side, pid in self.pids.items()}
        return Used(time.monotonic(), parts, machine_cpu_s() - cpu_s(os.getpid()))


@dataclass(frozen=True)
class Used:
    """CPU time, in seconds, at one moment of the monotonic clock."""

    at_s: float
    parts: dict[Side, dict[str, float]]
    """Of each side, by its parts."""
    others: float
    """Of processes that have nothing to do with this."""

    def since(self, before: "Used") -> dict[str, Any]:
        """What was used between two moments, as a sample has it."""
        parts = {
            side: {part: value - before.parts[side].get(part, 0.0) for part, value in now.items()}
            for side, now in self.parts.items()
        }
        total = {side: sum(used.values()) for side, used in parts.items()}
        return {
            "wall_s": self.at_s - before.at_s,
            "cpu_s": total | {"others": self.others - before.others},
            "parts_s": parts,
        }


def main(arguments: Sequence[str]) -> int:
    """Run it."""
    settings = parse_settings(OverheadSettings, "meshift bench overhead", arguments)
    with tempfile.TemporaryDirectory() as folder:
        samples = asyncio.run(_run(settings, resolve_model(settings.model), Path(folder)))
    result, cpu_ms = summary(samples), cpu_ms_per_token(samples)
    print_table([(key, str(value)) for key, value in result.items()])
    print(quiet_or_not(samples))
    print_table([(f"cpu_ms_per_token {name}", f"{value:.2f}") for name, value in cpu_ms.items()])
    circumstances = {
        "cpu_ms_per_token": cpu_ms,
        "others_cores": round(others_cores(samples), 3),
        "quiet": others_cores(samples) < OTHERS_CORES_MAX,
        "cores": len(os.sched_getaffinity(0)),
        "sglang": importlib.metadata.version("sglang"),
        "settings": settings.model_dump(mode="json", exclude={"json_path"}),
    }
    write_result(settings.json_path, result | circumstances, [*samples.throughput, *samples.first_token])
    return 0


async def _run(settings: OverheadSettings, model: Path, folder: Path) -> Samples:
    engine = sglang_settings(EngineSettings(model=model))
    samples = Samples()
    print("starting the mesh, then the bare server...", flush=True)
    async with (
        running_mesh(folder / "mesh", "--workers", "1", "--model", str(model)) as mesh,
        running_bare_server(engine, folder / "bare.log", settings.bare_niceness) as bare,
    ):
        servers = Servers({"bare": bare.url, "mesh": mesh.url}, {"bare": bare.pid, "mesh": mesh.process.pid})
        await measure_first_tokens(settings, model.name, servers, samples)
        await measure_throughput(settings, model, servers, samples, folder)
    return samples


async def measure_throughput(
    settings: OverheadSettings, model: Path, servers: Servers, samples: Samples, folder: Path
) -> None:
    """Pairs of runs with equal prompts; who comes first alternates."""
    requests = QUICK_REQUESTS if settings.quick else settings.requests
    load = Load(model, requests, settings.concurrency, settings.input_tokens, settings.output_tokens)
    for pair in range(QUICK_PAIRS if settings.quick else settings.pairs):
        for side in alternating(pair):
            at: dict[Phase, Used] = {}

            def note(phase: Phase, at: dict[Phase, Used] = at) -> None:
                at[phase] = servers.used_s()

            output = folder / f"{side}-{pair}.jsonl"
            result = await bench_serving(servers.urls[side], load, settings.seed + pair, output, note)
            used = at[Phase.END].since(at[Phase.BEGIN])
            samples.throughput.append({"measure": "throughput", "pair": pair, "side": side, **result, **used})
            print(f"pair {pair + 1}, {side}: {result['output_throughput']:.1f} tokens/s", flush=True)


async def measure_first_tokens(settings: OverheadSettings, model: str, servers: Servers, samples: Samples) -> None:
    """Pairs of single streamed chats with equal prompts that neither side has seen."""
    chance = random.Random(settings.seed)
    pairs = QUICK_FIRST_TOKEN_PAIRS if settings.quick else settings.first_token_pairs
    async with (
        httpx.AsyncClient(base_url=servers.urls["bare"], timeout=CHAT_DEADLINE_S) as bare,
        httpx.AsyncClient(base_url=servers.urls["mesh"], timeout=CHAT_DEADLINE_S) as mesh,
    ):
        clients: dict[Side, httpx.AsyncClient] = {"bare": bare, "mesh": mesh}
        for side, client in clients.items():
            # Batches as large as those at saturation, before anything counts.
            bodies = [short_chat(model, chance) for _ in range(settings.concurrency)]
            await asyncio.gather(*(stream_chat(client, body) for body in bodies))
            print(f"{side} is warm", flush=True)
        for pair in range(-WARM_UP_CHATS, pairs):
            body = short_chat(model, chance)
            for side in alternating(pair):
                begin_s = time.monotonic()
                chat = await stream_chat(clients[side], body)
                sample = {"measure": "first_token", "pair": pair, "side": side, "ttft_ms": 1e3 * chat.first_text_s}
                if pair >= 0:
                    samples.first_token.append({**sample, "total_ms": 1e3 * (time.monotonic() - begin_s)})


def alternating(pair: int) -> tuple[Side, ...]:
    """The order within a pair."""
    return SIDES if pair % 2 == 0 else SIDES[::-1]


def short_chat(model: str, chance: random.Random) -> dict[str, Any]:
    """A chat that begins with a random number, so that no prefix of it is cached."""
    text = " ".join([str(chance.randrange(10**9)), *chance.choices(WORDS, k=16)])
    return {
        "model": model,
        "messages": [{"role": "system", "content": text}, {"role": "user", "content": "Go on."}],
        "max_tokens": FIRST_TOKEN_OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }


def summary(samples: Samples) -> dict[str, Any]:
    """The figures, each the median over pairs."""
    ratios = [mesh / bare for bare, mesh in paired(samples.throughput, "output_throughput")]
    added = [mesh - bare for bare, mesh in paired(samples.first_token, "ttft_ms")]
    return {
        "throughput_ratio": round(statistics.median(ratios), 4),
        "throughput_ratio_spread": [round(min(ratios), 4), round(max(ratios), 4)],
        "ttft_added_ms_p50": round(statistics.median(added), 2),
    }


def cpu_ms_per_token(samples: Samples) -> dict[str, float]:
    """CPU time for a token at saturation, of each side and of its parts; and of each side for a second while the other
    one works. Of the load alone: while its generator starts, nothing is counted."""
    result: dict[str, float] = {}
    for side, other in (SIDES, SIDES[::-1]):
        runs = [sample for sample in samples.throughput if sample["side"] == side]
        tokens = sum(run["total_output_tokens"] for run in runs)
        result[side] = 1e3 * sum(run["cpu_s"][side] for run in runs) / tokens
        for part in sorted({part for run in runs for part in run["parts_s"][side]}):
            result[f"{side}, {part}"] = 1e3 * sum(run["parts_s"][side].get(part, 0.0) for run in runs) / tokens
        result[f"{other}, idle, per second"] = (
            1e3 * sum(run["cpu_s"][other] for run in runs) / sum(run["wall_s"] for run in runs)
        )
    return result


def others_cores(samples: Samples) -> float:
    """Cores that other processes took during the runs at saturation."""
    busy_s = sum(run["cpu_s"]["others"] for run in samples.throughput)
    return float(busy_s / sum(run["wall_s"] for run in samples.throughput))


def quiet_or_not(samples: Samples) -> str:
    """How much of the machine others took meanwhile, and what that means."""
    cores = others_cores(samples)
    text = f"other processes took {cores:.2f} of {os.cpu_count()} cores"
    return text if cores < OTHERS_CORES_MAX else f"{text}: the figures are not to be trusted"


def paired(samples: Sequence[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    """A measure of both sides, (bare, mesh), for each pair."""
    values = {(sample["pair"], sample["side"]): float(sample[name]) for sample in samples}
    pairs = sorted({pair for pair, _ in values})
    return [(values[pair, "bare"], values[pair, "mesh"]) for pair in pairs]
