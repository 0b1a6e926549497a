"""Moving a running request between two workers: how long it stands still, what its client sees, what others pay.

One request at a time is bounced to and fro, in all modes by turns, at several lengths of context, over a link of the
same rate for all. The workers keep no prefix cache, so that a request that comes back finds nothing of its own and
every move carries all of its KV. See `docs/benchmarks.md`.
"""

import asyncio
import json
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import httpx
from pydantic import Field

from meshift.benchmarks import move_co_located
from meshift.benchmarks.cpu_time import cpu_s, machine_cpu_s
from meshift.benchmarks.mesh_process import running_mesh
from meshift.benchmarks.move_figures import (
    MOVED,
    STEPS_AFTER,
    UNDISTURBED,
    Sample,
    decode_step_ms,
    move_figures,
    problems,
    rows,
)
from meshift.benchmarks.move_mesh import MeshStream, MoveMesh
from meshift.benchmarks.move_overhead import co_located
from meshift.benchmarks.move_tables import aims, chart, tables
from meshift.benchmarks.report import BenchmarkSettings, write_result
from meshift.schemas.moves import MoveMode, MoveReport
from meshift.services.cli.client import joined_bus
from meshift.services.cli.model import resolve_model
from meshift.services.cli.settings import parse_settings
from meshift.services.frontend.text.tokenizer import ChatTokenizer

WORKERS = ("worker-1", "worker-2")
FIRST_TOKENS = 4
"""Output before the first move."""
SETTLE_TOKENS = STEPS_AFTER + 2
"""Output between two moves, by which the destination's step is measured."""
GROWTH = 0.1
"""How much longer than at its first move a context may become by the last one, short ones excepted."""
OUTPUT_TOKENS_MIN = 48
QUICK_OUTPUT_TOKENS_MAX = 220
QUICK_REPEATS, QUICK_PAIRS = 3, 5
RECOMPUTE_EVERY = 3
REQUESTS_MAX = 64
"""At one context."""

SENTENCES = (
    "The old keeper climbed the stairs of the lighthouse and wrote down the weather.",
    "A ship with a red sail came around the cape in the morning.",
    "Nobody in the village remembered who had planted the pear tree by the well.",
    "In winter the river froze, and children crossed it on their way to school.",
    "The baker lit his oven at three, when the streets were still dark.",
    "She kept the letters in a tin box under the floor, tied with a green ribbon.",
    "Far to the north the mountains had been covered with snow since October.",
    "He counted the coins twice and put the smaller ones back into his pocket.",
)


class MoveSettings(BenchmarkSettings):
    """Bounce a request between two workers: live, blocking, and by recomputation."""

    model: str = Field("smollm2", description="a prepared model's name, or a folder")
    contexts: tuple[int, ...] = Field((256, 1024, 4096), description="tokens of context at the move")
    repeats: int = Field(
        12, ge=1, description="moves at each context, live and blocking (--quick: 3); a third as many recomputing"
    )
    pairs: int = Field(24, ge=2, description="windows with a move, and without, beside other requests (--quick: 5)")
    link_gbps: float = Field(0.5, gt=0, description="rate of the link between the workers, in 10^9 bits a second")
    threads: int | None = Field(None, ge=1, description="of each worker; without it, half of the cores")
    from_raw: Path | None = Field(None, description="measure nothing: compute the figures of these raw samples again")


@dataclass
class Run:
    """Of one benchmark, while it runs."""

    settings: MoveSettings
    mesh: MoveMesh
    tokenizer: ChatTokenizer
    token_bytes: int
    samples: list[Sample] = field(default_factory=list)

    @property
    def repeats(self) -> int:
        """Moves at each context, live and blocking."""
        return QUICK_REPEATS if self.settings.quick else self.settings.repeats

    def prompt(self, context: int) -> list[int]:
        """Tokens before the output, so that the first move finds `context`."""
        return prompt_of(self.tokenizer, context - FIRST_TOKENS, first=f"Story {context}.")

    def output_tokens(self, context: int) -> int:
        """Of every request with that context."""
        tokens = max(OUTPUT_TOKENS_MIN, round(GROWTH * context))
        return min(tokens, QUICK_OUTPUT_TOKENS_MAX) if self.settings.quick else tokens

    def tokens_of_move(self, context: int, mode: MoveMode, step_ms: float) -> int:
        """Output that a move may take at most, with what must follow."""
        copying = 0.0
        if mode is MoveMode.LIVE:
            copying = 8e-6 * context * self.token_bytes / self.settings.link_gbps / step_ms
        return math.ceil(1.2 * copying) + 2 * SETTLE_TOKENS


def main(arguments: Sequence[str]) -> int:
    """Run it."""
    settings = parse_settings(MoveSettings, "meshift bench move", arguments)
    if settings.from_raw is not None:
        samples = [json.loads(line) for line in settings.from_raw.read_text().splitlines()]
    else:
        with tempfile.TemporaryDirectory() as folder:
            samples = asyncio.run(measure(settings, resolve_model(settings.model), Path(folder)))
    return report(settings.json_path, samples)


def report(path: Path | None, samples: Sequence[Sample]) -> int:
    """Write and print everything; the exit status says whether the moves were right, not whether they were fast."""
    wrong = problems(samples)
    result = result_of(samples)
    write_result(path, result, samples)
    if path is not None:
        path.with_name(path.name + ".svg").write_text(chart(result))
    print(tables(result, samples))
    for aim in aims(result, move_figures(samples)):
        print(aim)
    for problem in wrong:
        print(f"wrong: {problem}")
    return 1 if wrong else 0


def result_of(samples: Sequence[Sample]) -> dict[str, Any]:
    """The JSON that is asked for."""
    circumstances = next(sample for sample in samples if sample["measure"] == "circumstances")
    return {
        "decode_step_ms_p50": round(decode_step_ms(samples), 3),
        "link_gbps": circumstances["settings"]["link_gbps"],
        "rows": rows(samples),
        "co_located": co_located(samples),
    }


async def measure(settings: MoveSettings, model: Path, folder: Path) -> list[Sample]:
    """All samples."""
    print("starting two workers...", flush=True)
    threads = settings.threads or max(1, len(os.sched_getaffinity(0)) // len(WORKERS))
    worker_settings = {
        "MESHIFT_PREFIX_CACHE": "false",
        "MESHIFT_DATA_BYTES_PER_S": str(settings.link_gbps * 1e9 / 8),
        "MESHIFT_THREADS_PER_RANK": str(threads),
    }
    up = ("--workers", str(len(WORKERS)), "--model", str(model))
    async with (
        running_mesh(folder, *up, settings=worker_settings) as process,
        httpx.AsyncClient(base_url=process.url, timeout=None) as rest,
        joined_bus(process.state().nats_url) as bus,
    ):
        mesh = MoveMesh(rest, bus, model.name)
        await mesh.join(WORKERS)
        run = Run(settings, mesh, ChatTokenizer.load(model), token_bytes_of(model))
        busy_s, begin_s = machine_cpu_s() - cpu_s(os.getpid()), asyncio.get_running_loop().time()
        await _measure_all(run)
        others_s = machine_cpu_s() - cpu_s(os.getpid()) - busy_s
        run.samples.insert(
            0,
            {
                "measure": "circumstances",
                "settings": settings.model_dump(mode="json", exclude={"json_path", "from_raw"}),
                "token_bytes": run.token_bytes,
                "threads": threads,
                "cores": len(os.sched_getaffinity(0)),
                "others_cores": others_s / (asyncio.get_running_loop().time() - begin_s),
            },
        )
    return run.samples


async def _measure_all(run: Run) -> None:
    settings, contexts = run.settings, run.settings.contexts
    await _warm_up(run)
    pairs = QUICK_PAIRS if settings.quick else settings.pairs
    print(f"{pairs} pairs of windows beside other requests...", flush=True)
    prompts = run.prompt(max(contexts)), prompt_of(run.tokenizer, 64), prompt_of(run.tokenizer, 64, first="Two.")
    run.samples += await move_co_located.measure(run.mesh, prompts, pairs)
    for context in contexts:
        await _measure_context(run, context)


async def _warm_up(run: Run) -> None:
    """A move in each mode, both ways, that counts nothing. Large copies come with the first pair of windows."""
    stream = run.mesh.open("warm-up", run.prompt(min(run.settings.contexts)), 400)
    for mode in (MoveMode.LIVE, MoveMode.BLOCKING, MoveMode.RECOMPUTE) * 2:
        await run.mesh.until_tokens(stream, len(stream.output) + FIRST_TOKENS)
        await run.mesh.order(stream, mode)
    await run.mesh.close(stream)


async def _measure_context(run: Run, context: int) -> None:
    print(f"{context} tokens: undisturbed...", flush=True)
    undisturbed = await _stream(run, context, UNDISTURBED, [], 0.0)
    step_ms = decode_step_ms([undisturbed])
    left = schedule(run.repeats)
    for number in range(REQUESTS_MAX):
        if left:
            await _stream(run, context, f"{MOVED}-{number}", left, step_ms)
            print(f"{context} tokens: {len(left)} moves left", flush=True)


def schedule(repeats: int) -> list[MoveMode]:
    """The modes take turns. Recomputing, which varies little and takes a prefill each time, is done less often."""
    modes: list[MoveMode] = []
    for number in range(repeats):
        modes += [MoveMode.LIVE, MoveMode.BLOCKING]
        modes += [MoveMode.RECOMPUTE] if number % RECOMPUTE_EVERY == 0 else []
    return modes


async def _stream(run: Run, context: int, name: str, left: list[MoveMode], step_ms: float) -> Sample:
    """One request to its end, moved as often as its output allows: those moves are taken from `left`. Its sample, which
    is among the run's now."""
    total = run.output_tokens(context)
    stream = run.mesh.open(f"{name}-{context}", run.prompt(context), total)
    await run.mesh.until_tokens(stream, FIRST_TOKENS)
    # Always one, or a request that has no room for it would be tried for ever.
    first = True
    while left and (first or len(stream.output) + run.tokens_of_move(context, left[0], step_ms) <= total):
        first = False
        run.samples.append(await _move(run, stream, left.pop(0), context))
        await run.mesh.until_tokens(stream, min(total, len(stream.output) + SETTLE_TOKENS))
    await run.mesh.finish(stream)
    await run.mesh.until_tokens(stream, total)
    sample = stream_sample(run.tokenizer, stream, UNDISTURBED if first else MOVED, context)
    run.samples.append(sample)
    return sample


async def _move(run: Run, stream: MeshStream, mode: MoveMode, context: int) -> Sample:
    mesh, source = run.mesh, stream.instance
    destination = mesh.other(source)
    before = await mesh.prefilled(destination)
    report: MoveReport = await mesh.order(stream, mode)
    # Its first token comes after what its destination computes of it anew.
    await mesh.tap.until(lambda: stream.instance == destination or report.outcome != "moved", "a token after the move")
    return {
        "measure": "move",
        "stream": stream.name,
        "mode": mode.value,
        "tokens": context,
        "source": source,
        "destination": destination,
        "prefilled": await mesh.prefilled(destination) - before,
        "report": report.model_dump(mode="json"),
    }


def stream_sample(tokenizer: ChatTokenizer, stream: MeshStream, mode: str, context: int) -> Sample:
    """What there is to know of a stream that has ended."""
    detokenizer = tokenizer.detokenizer()
    return {
        "measure": "stream",
        "name": stream.name,
        "mode": mode,
        "tokens": context,
        "prompt": str(context),
        "prompt_tokens": len(stream.prompt),
        "output": stream.output,
        "steps": [list(step) for step in stream.steps],
        "text": stream.client.text,
        "chunks": [[ns, len(text)] for ns, text in stream.client.chunks],
        "token_chars": list(accumulate(len(detokenizer.push([token])) for token in stream.output)),
    }


def prompt_of(tokenizer: ChatTokenizer, tokens: int, first: str = "") -> list[int]:
    """So many tokens of plain text, which begins with `first`."""
    ids: list[int] = tokenizer.encode(first)
    number = 0
    while len(ids) < tokens:
        ids += tokenizer.encode(f" {SENTENCES[number % len(SENTENCES)]} ({number})")
        number += 1
    return ids[:tokens]


def token_bytes_of(model: Path) -> int:
    """KV of one token on a CPU, where the engine computes in float32: keys and values of all layers and heads."""
    config = json.loads((model / "config.json").read_text())
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * config["num_hidden_layers"] * heads * head_dim * 4)
