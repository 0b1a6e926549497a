"""Attention on a CPU at long contexts: SGLang's `torch_native` against our kernel, in whole engines.

Two engines of the same model, one attention each, one computing thread each. In turn, the order changing each time:

    decode    a request with `--context` tokens of context gives `--steps` tokens: CPU time of the rank for one
    prefill   `--prefill` tokens after a cached prefix of as many: CPU time of the rank until the first token

CPU time is the rank process's own: others may be at work on the machine. Both engines must give the same tokens."""

import asyncio
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from meshift.backends.base import EngineFailure, EngineRequest, TokenEvent
from meshift.backends.sglang.engine import SglangEngine
from meshift.backends.sglang.settings import SglangSettings
from meshift.benchmarks.cpu_time import cpu_s
from meshift.benchmarks.report import BenchmarkSettings, print_table, write_result
from meshift.schemas.identity import RequestKey
from meshift.schemas.requests import Sampling
from meshift.services.cli.model import SMALL_MODEL, resolve_model
from meshift.services.cli.settings import parse_settings

BACKENDS = ("torch_native", "meshift_cpu")
STOP_DEADLINE_S = 5.0


class AttentionSettings(BenchmarkSettings):
    """Decode and prefill at long contexts, with SGLang's own attention and with ours."""

    model: str = Field(SMALL_MODEL, description="a prepared model's name, or a Hugging Face folder")
    context: int = Field(4000, ge=16, description="tokens of context of a decode step")
    steps: int = Field(24, ge=2, description="decode steps of a sample")
    prefill: int = Field(2000, ge=16, description="tokens to prefill, after a cached prefix of as many")
    repeats: int = Field(3, ge=1, description="samples of each (--quick: 2)")
    timeout_s: float = Field(120.0, gt=0, description="of one sample")
    seed: int = Field(0, description="of the prompts")


class Subject:
    """One engine, and what its only request has given."""

    def __init__(self, backend: str, settings: AttentionSettings, model: Path, log_dir: Path) -> None:
        self.backend = backend
        self._timeout_s = settings.timeout_s
        self._number = 0
        self._tokens: list[int] = []
        self._changed = asyncio.Event()
        self._lost = ""
        room = 2 * (settings.context + settings.steps + 2 * settings.prefill) + 64
        chosen = SglangSettings(
            model_path=model,
            model_name="model",
            log_dir=log_dir,
            instance_name=backend,
            capacity_tokens=room,
            threads_per_rank=1,
            attention_backend=backend,
        )
        self._engine = SglangEngine(chosen, random.Random(0))
        self._pid = 0
        self.vocabulary = 0

    async def start(self) -> None:
        """Until it serves."""
        info = await self._engine.start(self)
        (self._pid,), self.vocabulary = info.rank_pids, info.model.vocabulary_size

    async def stop(self) -> None:
        """End it."""
        await self._engine.stop(STOP_DEADLINE_S)

    def on_step(self, events: Sequence[TokenEvent]) -> None:
        """EngineListener."""
        for event in events:
            self._tokens += event.tokens
        self._changed.set()

    def on_failure(self, failure: EngineFailure) -> None:
        """EngineListener."""
        self._lost = failure.reason
        self._changed.set()

    async def run(self, prompt: Sequence[int], tokens: int) -> tuple[list[int], float, float]:
        """Give `tokens` tokens greedily; they, CPU seconds until the first, and from there to the last."""
        self._number += 1
        self._tokens = []
        sampling = Sampling(max_new_tokens=tokens, temperature=0.0, ignore_eos=True)
        begin_s = cpu_s(self._pid)
        self._engine.submit(EngineRequest(RequestKey(f"r{self._number}", 1, 0), prompt, (), sampling))
        await self._given(1)
        first_s = cpu_s(self._pid)
        await self._given(tokens)
        return self._tokens, first_s - begin_s, cpu_s(self._pid) - first_s

    async def _given(self, count: int) -> None:
        async with asyncio.timeout(self._timeout_s):
            while len(self._tokens) < count:
                if self._lost:
                    raise ConnectionError(self._lost)
                self._changed.clear()
                await self._changed.wait()


def main(arguments: Sequence[str]) -> int:
    """Run it."""
    settings = parse_settings(AttentionSettings, "meshift bench attention", list(arguments))
    samples = asyncio.run(_measure(settings, resolve_model(settings.model)))
    result = summary(samples)
    print_table([(name, str(value)) for name, value in result.items()])
    write_result(settings.json_path, result, samples)
    return 0 if result["identical"] else 1


def summary(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians in milliseconds, and how many times as much SGLang's own needs."""
    result: dict[str, Any] = {"identical": all(sample["identical"] for sample in samples)}
    for figure in ("decode_step_ms", "prefill_ms"):
        medians = [
            statistics.median(sample[figure] for sample in samples if sample["backend"] == backend)
            for backend in BACKENDS
        ]
        for backend, median in zip(BACKENDS, medians, strict=True):
            result[f"{figure}_{backend}"] = round(median, 1)
        result[f"{figure.removesuffix('_ms')}_ratio"] = round(medians[0] / medians[1], 2)
    return result


async def _measure(settings: AttentionSettings, model: Path) -> list[dict[str, Any]]:
    dice = random.Random(settings.seed)
    with tempfile.TemporaryDirectory() as folder:
        subjects = [Subject(backend, settings, model, Path(folder)) for backend in BACKENDS]
        try:
            for subject in subjects:
                await subject.start()
            return await _sample_all(settings, subjects, dice)
        finally:
            for subject in subjects:
                await subject.stop()


async def _sample_all(
    settings: AttentionSettings, subjects: Sequence[Subject], dice: random.Random
) -> list[dict[str, Any]]:
    repeats = min(settings.repeats, 2) if settings.quick else settings.repeats
    long = _prompt(settings.context, subjects[0], dice)
    prefix = _prompt(settings.prefill, subjects[0], dice)
    for subject in subjects:
        # Their KV is in the prefix cache from now on.
        await subject.run(long, 2)
        await subject.run(prefix, 2)
    samples: list[dict[str, Any]] = []
    for number in range(repeats):
        tail = _prompt(settings.prefill, subjects[0], dice)
        order = subjects if number % 2 == 0 else subjects[::-1]
        pair = [await _sample(subject, settings, long, [*prefix, *tail]) for subject in order]
        tokens = [sample.pop("tokens") for sample in pair]
        samples += [{**sample, "identical": tokens[0] == tokens[1]} for sample in pair]
    return samples


async def _sample(
    subject: Subject, settings: AttentionSettings, long: Sequence[int], prefilled: Sequence[int]
) -> dict[str, Any]:
    decoded, _, decode_s = await subject.run(long, settings.steps + 1)
    first, prefill_s, _ = await subject.run(prefilled, 1)
    return {
        "backend": subject.backend,
        "decode_step_ms": decode_s / settings.steps * 1e3,
        "prefill_ms": prefill_s * 1e3,
        "tokens": [*decoded, *first],
    }


def _prompt(tokens: int, subject: Subject, dice: random.Random) -> list[int]:
    return [dice.randrange(3, subject.vocabulary) for _ in range(tokens)]
