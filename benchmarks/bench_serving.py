"""SGLang's own load generator, in a process of its own."""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

PROGRAM = (sys.executable, "-P", "-m", "sglang.bench_serving")
RUN_DEADLINE_S = 600.0
OUTPUT_TAIL_CHARS = 3_000


class Phase(Enum):
    """Of the load, by what the generator says when it comes. Before it begins, the generator itself takes long to
    start; it begins a second after it is said."""

    BEGIN = "Starting main benchmark run"
    END = "Serving Benchmark Result"


OnPhase = Callable[[Phase], None]


class LoadError(Exception):
    """The load generator failed, or not every request was answered in full."""


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop of random prompts."""

    model_folder: Path
    """Names the model, and has the tokenizer that prompts are made with."""
    requests: int
    concurrency: int
    input_tokens: int
    output_tokens: int


async def bench_serving(url: str, load: Load, seed: int, output: Path, on_phase: OnPhase) -> dict[str, Any]:
    """Run the load against a server's chat completions; SGLang's result, without its arguments' echo.

    The same seed gives the same prompts. `on_phase` is called at each phase of the load, in order. Raises LoadError."""
    process = await asyncio.create_subprocess_exec(
        *PROGRAM,
        *_arguments(url, load, seed, output),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONUNBUFFERED": "1",
        },
    )
    try:
        said = await asyncio.wait_for(follow(process, on_phase), RUN_DEADLINE_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise LoadError(f"bench_serving ended with {process.returncode}:\n{said[-OUTPUT_TAIL_CHARS:]}")
    return check_result(_last_line(output), load)


async def follow(process: asyncio.subprocess.Process, on_phase: OnPhase) -> str:
    """Until the generator ends; what it said. Raises LoadError if it served and never said when."""
    assert process.stdout is not None
    said, coming = "", list(Phase)
    while line := (await process.stdout.readline()).decode(errors="replace"):
        said += line
        if coming and coming[0].value in line:
            on_phase(coming.pop(0))
    if await process.wait() == 0 and coming:
        raise LoadError(f"bench_serving never said {coming[0].value!r}:\n{said[-OUTPUT_TAIL_CHARS:]}")
    return said


def _last_line(output: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(output.read_text().splitlines()[-1])
    return result


def _arguments(url: str, load: Load, seed: int, output: Path) -> list[str]:
    options = {
        "backend": "sglang-oai-chat",
        "base-url": url,
        "model": load.model_folder.name,
        "tokenizer": load.model_folder,
        "dataset-name": "random-ids",
        "num-prompts": load.requests,
        "random-input-len": load.input_tokens,
        "random-output-len": load.output_tokens,
        "random-range-ratio": 1.0,
        "max-concurrency": load.concurrency,
        "seed": seed,
        # Its one request more would be computed, and not be counted.
        "warmup-requests": 0,
        "output-file": output,
    }
    return [word for name, value in options.items() for word in (f"--{name}", str(value))] + ["--disable-tqdm"]


def check_result(result: dict[str, Any], load: Load) -> dict[str, Any]:
    """The numbers of a result. Raises LoadError if a request failed or was cut short: its throughput says nothing."""
    tokens = load.requests * load.output_tokens
    if result["completed"] != load.requests or result["total_output_tokens"] != tokens:
        raise LoadError(
            f"{result['completed']} of {load.requests} requests and {result['total_output_tokens']} of {tokens} tokens"
        )
    return {name: value for name, value in result.items() if isinstance(value, int | float)}
