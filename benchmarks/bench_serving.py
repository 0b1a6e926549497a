"""SGLang's own load generator, in a process of its own."""

import asyncio
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRAM = (sys.executable, "-P", "-m", "sglang.bench_serving")
RUN_DEADLINE_S = 600.0
OUTPUT_TAIL_CHARS = 3_000


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


async def bench_serving(url: str, load: Load, seed: int, output: Path) -> dict[str, Any]:
    """Run the load against a server's chat completions; SGLang's result, without its arguments' echo.

    The same seed gives the same prompts. Raises LoadError."""
    process = await asyncio.create_subprocess_exec(
        *PROGRAM,
        *_arguments(url, load, seed, output),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    try:
        said, _ = await asyncio.wait_for(process.communicate(), RUN_DEADLINE_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise LoadError(f"bench_serving ended with {process.returncode}:\n{said.decode()[-OUTPUT_TAIL_CHARS:]}")
    return check_result(_last_line(output), load)


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
