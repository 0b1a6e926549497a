"""Two engines of one model, one computing thread each, that differ in attention: CPU time of a decode step."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshift.backends.base import EngineFailure, EngineRequest, TokenEvent
from meshift.backends.sglang.engine import SglangEngine
from meshift.backends.sglang.settings import SglangSettings
from meshift.benchmarks.cpu_time import cpu_s
from meshift.schemas.identity import RequestKey
from meshift.schemas.requests import Sampling

BACKENDS = ("torch_native", "meshift_cpu")
STOP_DEADLINE_S = 5.0
WARM_STEPS = 2
"""Of all requests together, before the clock starts."""


@dataclass
class EngineSamples:
    """What came of it."""

    samples: list[dict[str, Any]] = field(default_factory=list)
    identical: bool = True
    """Whether both engines gave the same tokens."""


class Subject:
    """One engine, and what its requests have given."""

    def __init__(self, backend: str, model: Path, log_dir: Path, capacity: int, timeout_s: float) -> None:
        self.backend = backend
        self._timeout_s = timeout_s
        self._number = 0
        self._tokens: dict[RequestKey, list[int]] = {}
        self._full_steps = 0
        """Steps that gave every request a token."""
        self._changed = asyncio.Event()
        self._lost = ""
        chosen = SglangSettings(
            model_path=model,
            model_name="model",
            log_dir=log_dir,
            instance_name=backend,
            capacity_tokens=capacity,
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
        given = {event.key for event in events if event.tokens}
        for event in events:
            self._tokens[event.key] += event.tokens
        self._full_steps += given == set(self._tokens)
        self._changed.set()

    def on_failure(self, failure: EngineFailure) -> None:
        """EngineListener."""
        self._lost = failure.reason
        self._changed.set()

    async def decode(self, prompts: Sequence[Sequence[int]], steps: int) -> tuple[float, list[list[int]]]:
        """CPU milliseconds of a step that all requests take part in, and the tokens that each gave first. Raises
        TimeoutError, ConnectionError."""
        self._number += 1
        keys = [RequestKey(f"r{self._number}.{index}", 1, 0) for index in range(len(prompts))]
        self._tokens = {key: [] for key in keys}
        self._full_steps = 0
        sampling = Sampling(max_new_tokens=steps * 2 + 64, temperature=0.0, ignore_eos=True)
        for key, prompt in zip(keys, prompts, strict=True):
            self._engine.submit(EngineRequest(key, prompt, (), sampling))
        await self._until(WARM_STEPS)
        begin_s, begin = cpu_s(self._pid), self._full_steps
        await self._until(begin + steps)
        step_ms = (cpu_s(self._pid) - begin_s) / (self._full_steps - begin) * 1e3
        first = [self._tokens[key][:steps] for key in keys]
        for key in keys:
            self._engine.cancel(key)
        await self._idle()
        return step_ms, first

    async def _until(self, full_steps: int) -> None:
        async with asyncio.timeout(self._timeout_s):
            while self._full_steps < full_steps:
                await self._change()

    async def _idle(self) -> None:
        async with asyncio.timeout(self._timeout_s):
            while self._engine.load().running:
                await self._change()

    async def _change(self) -> None:
        if self._lost:
            raise ConnectionError(self._lost)
        self._changed.clear()
        await self._changed.wait()


async def sample_engines(
    model: Path,
    log_dir: Path,
    *,
    contexts: Sequence[int],
    batch: int,
    steps: int,
    repeats: int,
    timeout_s: float,
    dice: random.Random,
) -> EngineSamples:
    """A sample an engine, context and repeat, in turns. The prompts' KV is in the prefix cache by then."""
    capacity = batch * (max(contexts) + 2 * len(contexts) * (steps + 64))
    subjects = [Subject(backend, model, log_dir, capacity, timeout_s) for backend in BACKENDS]
    found = EngineSamples()
    try:
        await asyncio.gather(*(subject.start() for subject in subjects))
        longest = [_prompt(max(contexts), subjects[0].vocabulary, dice) for _ in range(batch)]
        for context in sorted(contexts):
            prompts = [prompt[:context] for prompt in longest]
            # Their KV is in the prefix cache from now on. To compute it takes longest, and isn't measured: in parallel.
            await asyncio.gather(*(subject.decode(prompts, 2) for subject in subjects))
            for number in range(repeats):
                order = subjects if number % 2 == 0 else subjects[::-1]
                await _sample(found, order, prompts, context, steps)
    finally:
        for subject in subjects:
            await subject.stop()
    return found


async def _sample(
    found: EngineSamples, order: Sequence[Subject], prompts: Sequence[Sequence[int]], context: int, steps: int
) -> None:
    outputs = []
    for subject in order:
        step_ms, tokens = await subject.decode(prompts, steps)
        outputs.append(tokens)
        found.samples.append({"context": context, "backend": subject.backend, "step_ms": step_ms})
    found.identical = found.identical and outputs[0] == outputs[1]


def _prompt(tokens: int, vocabulary: int, dice: random.Random) -> list[int]:
    return [dice.randrange(3, vocabulary) for _ in range(tokens)]
