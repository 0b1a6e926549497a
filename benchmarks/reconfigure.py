"""Layers that move between the two stages of a real engine under load: how long it stops, and what its clients see.

Streams whose KV, prompts included, is at least 100 MB run while layers go from the first stage to the second and back,
in all modes by turns, over a link of the same rate for all. A stop is the longest time in which a stage could have
stepped and was held back (PipeLive: "the interval for which inference is interrupted"), of the stage where it is most.

    full                everything is there before the commit: weights, and KV but for the last patch
    no-patch            KV is copied within the commit
    no-patch-no-async   weights are loaded within the commit, too
    restart             the engine is stopped and started anew, and requests are computed again
"""

import asyncio
import itertools
import json
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import Field

from meshift.benchmarks.cpu_time import cpu_s, machine_cpu_s
from meshift.benchmarks.reconfigure_engine import Clock, Host, Stream, engine_settings
from meshift.benchmarks.reconfigure_figures import (
    FULL,
    MODES,
    NO_ASYNC,
    NO_PATCH,
    RESTART,
    UNDISTURBED,
    Sample,
    aims,
    chart,
    of_measure,
    result_of,
    table,
)
from meshift.benchmarks.report import BenchmarkSettings, write_result
from meshift.schemas.layouts import CommitMode
from meshift.services.cli.model import resolve_model
from meshift.services.cli.settings import parse_settings

LAYERS = 30
EVEN = (15, 15)
TOKEN_BYTES = LAYERS * 2 * 3 * 64 * 4
"""KV of one token of the model, in float32."""

CAPACITY_TOKENS = 8192
FIRST_TOKENS = 8
"""Of each stream, before the first change of a run."""

SETTLE_TOKENS = 6
"""Of each stream, between two changes."""

LAST_TOKENS = 24
"""So many must be left of each stream for another change."""

QUICK_LAYERS, QUICK_REPEATS = (1, 6, 14), 2
PROMPT_WORDS = range(1000, 20_000)


class ReconfigureSettings(BenchmarkSettings):
    """Move layers between two stages under load: full, without patches, without loading ahead, by a restart."""

    model: str = Field("smollm2", description="a prepared model's name, or a folder")
    layers: tuple[int, ...] = Field((1, 4, 8, 14), description="layers moved at once (--quick: 1, 6, 14)")
    repeats: int = Field(6, ge=1, description="changes of each kind there, and as many back (--quick: 2)")
    streams: int = Field(5, ge=1, description="that run all the time")
    tokens: int = Field(260, ge=2 * LAST_TOKENS, description="that each stream generates in a run")
    modes: tuple[str, ...] = Field(MODES, description="what is compared")
    prompt_tokens: int = Field(520, ge=1, description="of each stream")
    link_gbps: float = Field(2.0, gt=0, description="rate of the link between ranks, in 10^9 bits a second")
    threads: int | None = Field(None, ge=1, description="of each rank; without it, half of the cores")
    from_raw: Path | None = Field(None, description="measure nothing: compute the figures of these raw samples again")

    @property
    def layers_now(self) -> tuple[int, ...]:
        """With or without haste."""
        return QUICK_LAYERS if self.quick else self.layers

    @property
    def repeats_now(self) -> int:
        """With or without haste."""
        return min(self.repeats, QUICK_REPEATS) if self.quick else self.repeats


@dataclass
class Run:
    """Of one benchmark, while it goes on."""

    settings: ReconfigureSettings
    model: Path
    folder: Path
    clock: Clock = field(default_factory=Clock)
    samples: list[Sample] = field(default_factory=list)
    expected: list[list[int]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def prompts(self) -> list[list[int]]:
        """The same in all runs."""
        dice = random.Random(0)
        return [
            [dice.choice(PROMPT_WORDS) for _ in range(self.settings.prompt_tokens)]
            for _ in range(self.settings.streams)
        ]

    def host(self, layers: Sequence[int]) -> Host:
        """An engine, not started."""
        return Host(
            engine_settings(
                self.model,
                self.folder,
                layers,
                capacity_tokens=CAPACITY_TOKENS,
                threads_per_rank=self.settings.threads,
                data_bytes_per_s=self.settings.link_gbps * 1e9 / 8,
            ),
            self.clock,
        )

    def keep(self, run: int, kind: str, streams: Sequence[Stream]) -> None:
        """The streams of a run that has ended; the first ones say how all should be."""
        if not self.expected:
            self.expected = [list(stream.tokens) for stream in streams]
        for index, (stream, expected) in enumerate(zip(streams, self.expected, strict=True)):
            self.samples.append(
                {
                    "measure": "stream",
                    "run": run,
                    "kind": kind,
                    "stream": index,
                    "identical": stream.tokens == expected,
                    "times_ms": [round(time_ms, 3) for time_ms in stream.times_ms],
                }
            )


def main(arguments: Sequence[str]) -> int:
    """Run it."""
    settings = parse_settings(ReconfigureSettings, "meshift bench reconfigure", arguments)
    if settings.from_raw is not None:
        samples = [json.loads(line) for line in settings.from_raw.read_text().splitlines()]
    else:
        with tempfile.TemporaryDirectory() as folder:
            samples = asyncio.run(measure(Run(settings, resolve_model(settings.model), Path(folder))))
    return report(settings.json_path, samples)


def report(path: Path | None, samples: Sequence[Sample]) -> int:
    """Write and print everything; the exit status says whether the tokens were right, not whether it was fast."""
    result = result_of(samples)
    write_result(path, result, samples)
    if path is not None:
        path.with_name(path.name + ".svg").write_text(chart(result))
    circumstances = of_measure(samples, "circumstances")[0]
    print("\n".join(table(result)))
    print(
        f"decode step {result['decode_step_ms_p50']:.1f} ms, p99 of gaps {result['rows'][0]['normal_gap_ms_p99']:.1f}; "
        f"{result['live_kv_mb']:g} MB of KV; link {result['link_gbps']:g} Gb/s; other processes took "
        f"{circumstances['others_cores']:.2f} of {circumstances['cores']} cores"
    )
    for aim in aims(result):
        print(aim)
    return 0 if all(row["identical"] for row in result["rows"]) else 1


async def measure(run: Run) -> list[Sample]:
    """All samples."""
    began_ms, machine_s, own_s = run.clock.ms(), machine_cpu_s(), cpu_s(os.getpid())
    host = run.host(EVEN)
    await host.start()
    try:
        await _undisturbed(run, host)
        live_bytes = await _changes(run, host)
        if RESTART in run.settings.modes:
            await _restart(run, host)
    finally:
        await host.stop()
    seconds = (run.clock.ms() - began_ms) / 1e3
    others_s = machine_cpu_s() - machine_s - (cpu_s(os.getpid()) - own_s)
    run.samples.insert(
        0,
        {
            "measure": "circumstances",
            "live_kv_bytes": live_bytes,
            "link_gbps": run.settings.link_gbps,
            "cores": os.cpu_count(),
            "others_cores": round(max(0.0, others_s / seconds), 3),
            "seconds": round(seconds, 1),
            "settings": run.settings.model_dump(mode="json"),
        },
    )
    return run.samples


def _start(run: Run, host: Host) -> list[Stream]:
    streams = [Stream(prompt) for prompt in run.prompts()]
    for stream in streams:
        host.submit(stream, run.settings.tokens)
    return streams


async def _undisturbed(run: Run, host: Host) -> None:
    """Twice: the first time prompts are computed, as never again."""
    for kind in ("first", UNDISTURBED):
        streams = _start(run, host)
        await host.done(streams)
        run.keep(next(run.numbers), kind, streams)


def _wanted(settings: ReconfigureSettings) -> list[tuple[str, CommitMode, int]]:
    """Mode, commit and layers of each pair of changes there and back, all kinds by turns."""
    kinds = [
        (FULL, CommitMode.LAG),
        (FULL, CommitMode.DRAIN),
        (NO_PATCH, CommitMode.DRAIN),
        (NO_ASYNC, CommitMode.DRAIN),
    ]
    return [
        (mode, commit, count)
        for _ in range(settings.repeats_now)
        for count in settings.layers_now
        for mode, commit in kinds
        if mode in settings.modes
    ]


async def _changes(run: Run, host: Host) -> int:
    """All changes but restarts, in as many runs as it takes; bytes of KV that lived at the first of them."""
    left, live_bytes, tokens = _wanted(run.settings), 0, run.settings.tokens
    while left:
        number, streams = next(run.numbers), _start(run, host)
        await host.reached(streams, [FIRST_TOKENS] * len(streams))
        load = host.engine.load()
        live_bytes = live_bytes or (load.used + load.cached) * TOKEN_BYTES
        while left and all(len(stream.tokens) < tokens - LAST_TOKENS for stream in streams):
            mode, commit, count = left.pop(0)
            for layers in ((EVEN[0] - count, EVEN[1] + count), EVEN):
                sample = await host.reshape(mode, commit, layers, run.clock)
                run.samples.append({**sample, "run": number})
                counts = [min(len(stream.tokens) + SETTLE_TOKENS, tokens) for stream in streams]
                await host.reached(streams, counts)
        await host.done(streams)
        run.keep(number, FULL, streams)
    return live_bytes


async def _restart(run: Run, host: Host) -> None:
    """Stop the engine and start it with another layout; streams go on from where they were."""
    number, streams, count = next(run.numbers), _start(run, host), run.settings.layers_now[-1]
    await host.reached(streams, [FIRST_TOKENS] * len(streams))
    began_ms = run.clock.ms()
    await host.stop()
    other = run.host((EVEN[0] - count, EVEN[1] + count))
    await other.start()
    try:
        reached = [len(stream.tokens) for stream in streams]
        for stream in streams:
            other.submit(stream, run.settings.tokens)
        await other.until(lambda: any(len(s.tokens) > n for s, n in zip(streams, reached, strict=True)))
        ended_ms = run.clock.ms()
        await other.done(streams)
    finally:
        await other.stop()
    run.keep(number, RESTART, streams)
    run.samples.append(
        {
            "measure": "change",
            "run": number,
            "mode": RESTART,
            "commit": CommitMode.DRAIN.value,
            "layers_moved": count,
            "began_ms": began_ms,
            "commit_ms": began_ms,
            "ended_ms": ended_ms,
            "stop_ns": [int((ended_ms - began_ms) * 1e6)],
            "last_patch_tokens": 0,
            "last_patch_bytes": 0,
        }
    )
