"""A skewed burst on two real workers, with moves and without, by turns.

Requests come in pairs at once: one of long output, one of short. Nobody knows which is which; dispatched in turn, all
the long ones come to one worker. Soon the other has nothing to do, while requests queue at the first for the memory
that the long ones grow into. With moves on, the scheduler has them moved: those that wait, and those that run when
memory runs short. Both rounds of a pair send the same prompts to the same mesh; only `migration.enabled` differs. See
`docs/benchmarks.md`.
"""

import asyncio
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

import httpx
from pydantic import Field

from meshift.benchmarks.cpu_time import cpu_s, machine_cpu_s
from meshift.benchmarks.experiments.runs import print_rows
from meshift.benchmarks.mesh_process import running_mesh
from meshift.benchmarks.move import prompt_of
from meshift.benchmarks.move_mesh import MeshStream, MoveBenchmarkError, MoveMesh
from meshift.benchmarks.report import BenchmarkSettings, percentile, write_result
from meshift.client.mesh import MeshClient
from meshift.schemas.errors import MeshError
from meshift.schemas.moves import MoveOutcome
from meshift.services.cli.client import joined_bus
from meshift.services.cli.errors import EXIT_ERROR, CommandError
from meshift.services.cli.model import resolve_model
from meshift.services.cli.settings import parse_settings
from meshift.services.frontend.text.tokenizer import ChatTokenizer
from meshift.services.scheduler.policy.settings import PolicyName

WORKERS = ("worker-1", "worker-2")
QUICK_PAIRS = 2
ARRIVAL_GAP_S = 0.01
"""Between two requests of the burst: they come in their order, long before any of them ends."""
QUIET_S_MAX = 30.0
LOOK_S = 0.1
P99 = 0.99

Sample = dict[str, Any]
FIGURES = ("ttft_p99_s", "ttft_mean_s", "e2e_p99_s", "e2e_mean_s", "span_s")


class RebalanceSettings(BenchmarkSettings):
    """Send a skewed burst to two workers, with moves on and off by turns."""

    model: str = Field("smollm2", description="a prepared model's name, or a folder")
    engine: Literal["sglang", "sim"] = Field("sglang", description="sim: only to try the benchmark itself")
    policy: PolicyName = Field("meshift", description="who moves: meshift, llumnix or llumnix-base")
    pairs: int = Field(6, ge=1, description="pairs of rounds, one with moves and one without (--quick: 2)")
    burst: int = Field(6, ge=2, description="long requests of a burst, and as many short ones")
    prompt_tokens: int = Field(64, ge=8, description="of every request")
    long_tokens: int = Field(200, ge=2, description="output of the long ones")
    short_tokens: int = Field(6, ge=2, description="output of the short ones")
    capacity_tokens: int = Field(768, ge=128, description="KV cache of a worker")
    threads: int | None = Field(None, ge=1, description="of each worker; without it, half of the cores")


@dataclass(frozen=True, slots=True)
class Burst:
    """The requests, in the order in which they come."""

    prompts: tuple[tuple[int, ...], ...]
    outputs: tuple[int, ...]

    @classmethod
    def of(cls, settings: RebalanceSettings, tokenizer: ChatTokenizer) -> "Burst":
        """Long and short ones by turns; no two prompts begin alike."""
        count = 2 * settings.burst
        prompts = (prompt_of(tokenizer, settings.prompt_tokens, f"Tale {number + 1}.") for number in range(count))
        outputs = (settings.short_tokens if number % 2 else settings.long_tokens for number in range(count))
        return cls(tuple(map(tuple, prompts)), tuple(outputs))


def main(arguments: Sequence[str]) -> int:
    """Run it. The exit status says whether outputs were right, not whether moves paid."""
    settings = parse_settings(RebalanceSettings, "meshift bench rebalance", arguments)
    model = resolve_model(settings.model)
    try:
        with tempfile.TemporaryDirectory() as folder:
            samples = asyncio.run(measure(settings, model, Path(folder)))
    except (MoveBenchmarkError, MeshError) as error:
        raise CommandError(str(error), EXIT_ERROR) from error
    result = result_of(samples)
    write_result(settings.json_path, result, samples)
    print_rows(result["rows"])
    print_rows(result["ratios"])
    for line in verdict(result):
        print(line)
    return 0 if result["identical"] else 1


async def measure(settings: RebalanceSettings, model: Path, folder: Path) -> list[Sample]:
    """All samples, a request a line, after one of the circumstances."""
    cores = len(os.sched_getaffinity(0))
    worker_settings = {
        "MESHIFT_ENGINE": settings.engine,
        "MESHIFT_PREFIX_CACHE": "false",
        "MESHIFT_CAPACITY_TOKENS": str(settings.capacity_tokens),
        "MESHIFT_THREADS_PER_RANK": str(settings.threads or max(1, cores // len(WORKERS))),
    }
    print("starting two workers...", flush=True)
    up = ("--workers", str(len(WORKERS)), "--model", str(model))
    async with (
        running_mesh(folder, *up, settings=worker_settings) as process,
        httpx.AsyncClient(base_url=process.url, timeout=None) as rest,
        MeshClient(process.url) as admin,
        joined_bus(process.state().nats_url) as bus,
    ):
        mesh = MoveMesh(rest, bus, model.name)
        await mesh.join(WORKERS)
        burst = Burst.of(settings, ChatTokenizer.load(model))
        play = Play(mesh, admin, burst, settings.policy)
        await play.round(moves=True, name="warm-up")
        busy_s, begin_s = machine_cpu_s() - cpu_s(os.getpid()), asyncio.get_running_loop().time()
        samples = await play.rounds(QUICK_PAIRS if settings.quick else settings.pairs)
        others_s = machine_cpu_s() - cpu_s(os.getpid()) - busy_s
    circumstances = {
        "measure": "circumstances",
        "settings": settings.model_dump(mode="json", exclude={"json_path"}),
        "cores": cores,
        "others_cores": others_s / (asyncio.get_running_loop().time() - begin_s),
    }
    return [circumstances, *samples]


@dataclass(frozen=True, slots=True)
class Play:
    """Rounds on one mesh."""

    mesh: MoveMesh
    admin: MeshClient
    burst: Burst
    policy: PolicyName

    async def rounds(self, pairs: int) -> list[Sample]:
        """The pairs, each in the other order than the one before. Raises MoveBenchmarkError."""
        samples = []
        for pair in range(pairs):
            for moves in (False, True) if pair % 2 == 0 else (True, False):
                print(f"pair {pair + 1} of {pairs}, moves {'on' if moves else 'off'}", flush=True)
                found = await self.round(moves=moves, name=f"p{pair}-{'on' if moves else 'off'}")
                samples += [{"measure": "request", "pair": pair, "moves": moves, **sample} for sample in found]
        return samples

    async def round(self, *, moves: bool, name: str) -> list[Sample]:
        """One burst to its end; a sample a request."""
        await until_quiet(self.mesh)
        before = await moved_requests(self.admin)
        await self.admin.change_policy({"policy": "round-robin"})
        opened = await self._send(name)
        await self.admin.change_policy({"policy": self.policy, "migration": {"enabled": moves}})
        for (stream, _), output in zip(opened, self.burst.outputs, strict=True):
            await self.mesh.finish(stream)
            await self.mesh.until_tokens(stream, output)
        gone = await moved_requests(self.admin) - before
        return [
            sample_of(number, stream, begin_ns, stream.request_id in gone)
            for number, (stream, begin_ns) in enumerate(opened)
        ]

    async def _send(self, name: str) -> list[tuple[MeshStream, int]]:
        """Begin all; returns, with the times of their beginning, when each has been dispatched."""
        loop = asyncio.get_running_loop()
        opened = []
        for number, (prompt, output) in enumerate(zip(self.burst.prompts, self.burst.outputs, strict=True)):
            opened.append((self.mesh.open(f"{name}-{number}", prompt, output), round(loop.time() * 1e9)))
            await asyncio.sleep(ARRIVAL_GAP_S)
        await self._until_placed([stream for stream, _ in opened])
        return opened

    async def _until_placed(self, streams: Sequence[MeshStream]) -> None:
        """Until each has an owner. Raises what a client got instead."""
        try:
            async with asyncio.timeout(QUIET_S_MAX):
                while True:
                    for stream in streams:
                        if stream.task is not None and stream.task.done():
                            stream.task.result()
                    placed = {request.request_id for request in await self.admin.open_requests() if request.owner}
                    if len(placed | {stream.request_id for stream in streams if stream.output}) == len(streams):
                        return
                    await asyncio.sleep(LOOK_S / 4)
        except TimeoutError:
            raise MoveBenchmarkError(f"{QUIET_S_MAX} s until all requests are dispatched") from None


def sample_of(number: int, stream: MeshStream, begin_ns: int, moved: bool) -> Sample:
    """What one client saw."""
    chunks = stream.client.chunks
    return {
        "request": number,
        "long": number % 2 == 0,
        "begin_ns": begin_ns,
        "ttft_s": (chunks[0][0] - begin_ns) / 1e9,
        "e2e_s": (chunks[-1][0] - begin_ns) / 1e9,
        "moved": moved,
        "first_on": stream.steps[0].instance,
        "last_on": stream.instance,
        "output": list(stream.output),
        "text": stream.client.text,
    }


async def until_quiet(mesh: MoveMesh) -> None:
    """Until neither worker has anything to do. Raises MoveBenchmarkError."""
    try:
        async with asyncio.timeout(QUIET_S_MAX):
            while any([(await mesh.status(name)).requests for name in WORKERS]):
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        raise MoveBenchmarkError(f"workers are busy {QUIET_S_MAX} s after the burst") from None


async def moved_requests(admin: MeshClient) -> set[str]:
    """Ids of those that went to another worker, of all that workers remember."""
    listed = await admin.moves()
    return {report.request_id for reply in listed.data for report in reply.ended if report.outcome is MoveOutcome.MOVED}


# ---- figures, from the samples alone


def result_of(samples: Sequence[Sample]) -> dict[str, Any]:
    """The JSON that is asked for."""
    circumstances, *requests = samples
    rows = [row_of(pair, moves, members) for (pair, moves), members in sorted(_rounds_of(requests).items())]
    return {
        "settings": circumstances["settings"],
        "cores": circumstances["cores"],
        "others_cores": circumstances["others_cores"],
        "rows": rows,
        "ratios": ratios(rows),
        "identical": not altered(requests),
        "altered": altered(requests),
    }


def _rounds_of(requests: Sequence[Sample]) -> dict[tuple[int, bool], list[Sample]]:
    rounds: dict[tuple[int, bool], list[Sample]] = {}
    for sample in requests:
        rounds.setdefault((sample["pair"], sample["moves"]), []).append(sample)
    return rounds


def row_of(pair: int, moves: bool, members: Sequence[Sample]) -> dict[str, Any]:
    """One round."""
    ttft, e2e = [sample["ttft_s"] for sample in members], [sample["e2e_s"] for sample in members]
    begin_ns = min(sample["begin_ns"] for sample in members)
    end_s = max(sample["begin_ns"] / 1e9 + sample["e2e_s"] for sample in members)
    return {
        "pair": pair,
        "moves": "on" if moves else "off",
        "ttft_p99_s": percentile(ttft, P99),
        "ttft_mean_s": fmean(ttft),
        "e2e_p99_s": percentile(e2e, P99),
        "e2e_mean_s": fmean(e2e),
        "span_s": end_s - begin_ns / 1e9,
        "moved": sum(sample["moved"] for sample in members),
        "long_at_first": most_together(members, "first_on"),
        "long_at_last": most_together(members, "last_on"),
    }


def most_together(members: Sequence[Sample], where: str) -> int:
    """Of the long requests, how many had one worker at their first or last token: the more, the more skewed."""
    places = [sample[where] for sample in members if sample["long"]]
    return max(map(places.count, WORKERS))


def ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How many times greater each figure is without moves, pair by pair: median, least and greatest."""
    found = []
    for figure in FIGURES:
        values: dict[int, dict[str, float]] = {}
        for row in rows:
            values.setdefault(row["pair"], {})[row["moves"]] = row[figure]
        quotients = [pair["off"] / pair["on"] for pair in values.values() if pair.keys() == {"off", "on"}]
        if quotients:
            spread = {"median": median(quotients), "least": min(quotients), "greatest": max(quotients)}
            found.append({"figure": figure, "ratio": "off / on", **spread, "pairs": len(quotients)})
    return found


def altered(requests: Sequence[Sample]) -> list[int]:
    """Requests whose text or tokens differ between any two rounds."""
    outputs: dict[int, set[tuple[str, tuple[int, ...]]]] = {}
    for sample in requests:
        outputs.setdefault(sample["request"], set()).add((sample["text"], tuple(sample["output"])))
    return sorted(number for number, found in outputs.items() if len(found) > 1)


def verdict(result: dict[str, Any]) -> list[str]:
    """In words."""
    said = []
    if result["others_cores"] > 0.1:
        said.append(f"others used {result['others_cores']:.2f} cores: times mean little, their ratios more")
    if not any(row["moved"] for row in result["rows"] if row["moves"] == "on"):
        said.append("nothing moved: this burst is no burst for this machine; a smaller --capacity-tokens makes it one")
    if result["altered"]:
        said.append(f"wrong: requests {result['altered']} gave different outputs in different rounds")
    else:
        said.append("all outputs are the same in all rounds")
    return said
