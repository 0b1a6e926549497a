"""What the tests of moving layers do with an engine."""

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

from meshift.backends.layouts import LayoutChange, LayoutCommitted, LayoutNow, ReconfigurableEngine
from meshift.schemas.layouts import CommitMode, LayoutFlags, split_of
from tests.contract.engine_kit import Rig, Stream
from tests.integration.sglang.generation import KINDS, submit

POLL_S = 0.01
TAU_TOKENS = 50
STEPS_BETWEEN = 5
"""Tokens of each stream between two changes."""

_numbers = itertools.count(1)


def reconfigurable(rig: Rig) -> ReconfigurableEngine:
    """The rig's engine."""
    assert isinstance(rig.engine, ReconfigurableEngine)
    return rig.engine


async def now(rig: Rig) -> LayoutNow:
    """Its layout."""
    return await reconfigurable(rig).layout()


async def begin(rig: Rig, layers: Sequence[int], **fields: Any) -> LayoutChange:
    """A change to so many layers a stage."""
    epoch = (await now(rig)).layout.epoch
    change = LayoutChange(f"reshape-{next(_numbers)}", epoch, split_of(tuple(layers)), **fields)
    await reconfigurable(rig).begin_layout(change)
    return change


async def converged(rig: Rig, change: LayoutChange) -> None:
    """Wait until weights are there and little lags."""
    async with asyncio.timeout(rig.timeout_s):
        while True:
            progress = await reconfigurable(rig).layout_progress(change.change_id)
            assert progress.failure == ""
            if progress.weights_loaded and progress.lag_tokens <= TAU_TOKENS:
                return
            await asyncio.sleep(POLL_S)


async def prepare(rig: Rig, layers: Sequence[int], **fields: Any) -> LayoutChange:
    """A change that can be committed."""
    change = await begin(rig, layers, **fields)
    flags: LayoutFlags = change.flags
    if not flags.no_async:
        await reconfigurable(rig).load_weights(change.change_id)
    if not flags.no_patch:
        await reconfigurable(rig).start_kv_migration(change.change_id, None)
        await converged(rig, change)
    return change


async def commit(rig: Rig, change: LayoutChange, mode: CommitMode) -> LayoutCommitted:
    """Commit, and see that it came about."""
    done = await reconfigurable(rig).commit_layout(change.change_id, mode, rig.timeout_s)
    print(done.commit, change.target, "stops", [stop / 1e6 for stop in done.stop_ns], "ms;", done.last_patch_tokens)
    assert done.now.layout.layer_ranges == change.target
    assert done.now.layout.epoch == change.epoch + 1
    assert done.now.kv is not None
    assert done.now.kv.layer_ranges == change.target
    return done


async def reshape(rig: Rig, layers: Sequence[int], mode: CommitMode, **fields: Any) -> LayoutCommitted:
    """All of it."""
    return await commit(rig, await prepare(rig, layers, **fields), mode)


def start_streams(rig: Rig, prompts: Sequence[Sequence[int]], tokens: int) -> list[Stream]:
    """One for each prompt, sampled in all ways by turns."""
    kinds = itertools.cycle(KINDS)
    return [submit(rig, prompt, max_new_tokens=tokens, **next(kinds)) for prompt in prompts]


async def go_on(rig: Rig, streams: Sequence[Stream], steps: int = STEPS_BETWEEN) -> None:
    """Until each has so many more tokens, or has ended."""
    wanted = [(stream, len(stream.tokens) + steps) for stream in streams]
    for stream, count in wanted:
        await rig.produced(stream, count)
