"""Streams on one engine, and changes of its layout under them, with the time of everything."""

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshift.backends.base import EngineFailure, EngineRequest, TokenEvent
from meshift.backends.layouts import LayoutChange
from meshift.backends.sglang.engine import SglangEngine
from meshift.backends.sglang.settings import SglangSettings
from meshift.benchmarks.reconfigure_figures import NO_ASYNC, NO_PATCH
from meshift.schemas.identity import RequestKey
from meshift.schemas.layouts import CommitMode, LayoutFlags, split_of
from meshift.schemas.requests import Sampling

START_DEADLINE_S, STOP_DEADLINE_S, WAIT_S = 300.0, 20.0, 300.0
POLL_S = 0.01
TAU_TOKENS = 50
FLAGS = {
    NO_PATCH: LayoutFlags(no_patch=True),
    NO_ASYNC: LayoutFlags(no_patch=True, no_async=True),
}
_numbers = itertools.count(1)


class BenchmarkFailed(Exception):
    """The engine has failed."""


@dataclass
class Stream:
    """One request's tokens, over all its owners."""

    prompt: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    times_ms: list[float] = field(default_factory=list)
    done: bool = False


class Clock:
    """Milliseconds since the benchmark began."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    def ms(self) -> float:
        """Now."""
        return (time.monotonic() - self._began_s) * 1e3


class Host:
    """An engine with the listener that it reports to."""

    def __init__(self, settings: SglangSettings, clock: Clock) -> None:
        self.engine = SglangEngine(settings, random.Random(0))
        self._clock = clock
        self._streams: dict[RequestKey, Stream] = {}
        self._failure: EngineFailure | None = None
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Until it serves."""
        await self.engine.start(self)

    async def stop(self) -> None:
        """With its processes."""
        await self.engine.stop(STOP_DEADLINE_S)

    def submit(self, stream: Stream, tokens: int) -> None:
        """Generate until the stream has so many tokens in all."""
        key = RequestKey(f"bench-{next(_numbers)}", 1, 0)
        self._streams[key] = stream
        sampling = Sampling(max_new_tokens=tokens, temperature=0.0, ignore_eos=True)
        self.engine.submit(EngineRequest(key, stream.prompt, list(stream.tokens), sampling))

    def on_step(self, events: Sequence[TokenEvent]) -> None:
        """See `EngineListener`."""
        now_ms = self._clock.ms()
        for event in events:
            stream = self._streams[event.key]
            stream.tokens.extend(event.tokens)
            stream.times_ms.extend([now_ms] * len(event.tokens))
            stream.done = stream.done or event.finish is not None
        self._changed.set()

    def on_failure(self, failure: EngineFailure) -> None:
        """See `EngineListener`."""
        self._failure = failure
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Looked at after each step. Raises BenchmarkFailed, TimeoutError."""
        async with asyncio.timeout(WAIT_S):
            while not condition():
                if self._failure is not None:
                    raise BenchmarkFailed(self._failure.reason)
                self._changed.clear()
                await self._changed.wait()

    async def done(self, streams: Sequence[Stream]) -> None:
        """Until all have ended."""
        await self.until(lambda: all(stream.done for stream in streams))

    async def reached(self, streams: Sequence[Stream], counts: Sequence[int]) -> None:
        """Until each has so many tokens."""
        await self.until(lambda: all(len(one.tokens) >= count for one, count in zip(streams, counts, strict=True)))

    async def reshape(self, mode: str, commit: CommitMode, layers: Sequence[int], clock: Clock) -> dict[str, Any]:
        """One change, by the contract's steps; its sample."""
        engine, began_ms = self.engine, clock.ms()
        before = (await engine.layout()).layout
        change_id = f"bench-{next(_numbers)}"
        flags = FLAGS.get(mode, LayoutFlags())
        change = LayoutChange(change_id, before.epoch, split_of(tuple(layers)), flags, WAIT_S)
        await engine.begin_layout(change)
        if not flags.no_async:
            await engine.load_weights(change_id)
        if not flags.no_patch:
            await engine.start_kv_migration(change_id, None)
        await self._ready(change_id, flags)
        commit_ms = clock.ms()
        done = await engine.commit_layout(change_id, commit, WAIT_S)
        return {
            "measure": "change",
            "mode": mode,
            "commit": done.commit.value,
            "layers_moved": abs(change.target[0][1] - before.layer_ranges[0][1]),
            "began_ms": began_ms,
            "commit_ms": commit_ms,
            "ended_ms": clock.ms(),
            "stop_ns": list(done.stop_ns),
            "last_patch_tokens": done.last_patch_tokens,
            "last_patch_bytes": done.last_patch_bytes,
        }

    async def _ready(self, change_id: str, flags: LayoutFlags) -> None:
        async with asyncio.timeout(WAIT_S):
            while True:
                progress = await self.engine.layout_progress(change_id)
                if progress.failure:
                    raise BenchmarkFailed(progress.failure)
                loaded = flags.no_async or progress.weights_loaded
                if loaded and (flags.no_patch or progress.lag_tokens <= TAU_TOKENS):
                    return
                await asyncio.sleep(POLL_S)


def engine_settings(model: Path, log_dir: Path, layers: Sequence[int], **fields: Any) -> SglangSettings:
    """Two stages with so many layers."""
    return SglangSettings(
        model_path=model,
        model_name=model.name,
        log_dir=log_dir,
        pipeline_stages=len(layers),
        layer_partition=tuple(layers),
        start_timeout_s=START_DEADLINE_S,
        **fields,
    )
