"""Many changes of layers, over three stages and on the chat model, under streams all the time."""

import asyncio
import random
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from meshift.backends.base import ResizableEngine
from meshift.schemas.layouts import CommitMode, counts_of
from tests.contract.engine_kit import Rig, Stream
from tests.integration.sglang.conftest import SEED, moving
from tests.integration.sglang.generation import results, submit
from tests.integration.sglang.layer_changes import begin, go_on, now, reconfigurable, reshape, start_streams

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.soak,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="session"),
]

CHANGES = 50
ABORTS_OF_TEN = 3
ROUND_CHANGES = 5
"""While the same streams run."""

TOKENS = 220
LONG_PROMPT = 900
RSS_GROWTH_BYTES_MAX = 64 << 20
SETTLE_S, STEADY_LOOKS = 30.0, 4


def rank_books(rig: Rig) -> list[tuple[int, int, int]]:
    """Threads, open files and resident bytes of each rank."""
    books = []
    for pid in rig.info.rank_pids:
        proc = Path(f"/proc/{pid}")
        resident = int((proc / "statm").read_text().split()[1]) * 4096
        books.append((len(list((proc / "task").iterdir())), len(list((proc / "fd").iterdir())), resident))
    return books


async def settled_books(rig: Rig) -> list[tuple[int, int, int]]:
    """Once what is freed in the background is freed: for a while nobody's memory falls."""
    books, steady, deadline_s = rank_books(rig), 0, time.monotonic() + SETTLE_S
    while steady < STEADY_LOOKS and time.monotonic() < deadline_s:
        await asyncio.sleep(0.5)
        before, books = books, rank_books(rig)
        falls = any(now[2] < then[2] for now, then in zip(books, before, strict=True))
        steady = 0 if falls else steady + 1
    return books


def some_split(dice: random.Random, layers: int, stages: int, k: int = 1) -> tuple[int, ...]:
    """Any, empty stages included."""
    bounds = sorted(dice.randrange(0, layers // k + 1) * k for _ in range(stages - 1))
    edges = [0, *bounds, layers]
    return tuple(high - low for low, high in pairwise(edges))


async def many_changes(rig: Rig, prompts: Sequence[Sequence[int]], tokens: int, changes: int) -> None:
    """Changes at random, some aborted, with a long prompt arriving at each; the streams stay as they are. In the
    second half of them nothing grows: before, caches fill, and what is used for the first time stays."""
    dice, long_prompt, layout = random.Random(SEED), rig.prompt(LONG_PROMPT), (await now(rig)).layout
    expected = [one.tokens for one in await results(rig, *start_streams(rig, prompts, tokens))]
    (late_expected,) = await results(rig, submit(rig, long_prompt, max_new_tokens=4))
    books = []
    for half in (0, changes // 2), (changes // 2, changes):
        done = half[0]
        while done < half[1]:
            streams = start_streams(rig, prompts, tokens)
            await go_on(rig, streams)
            done += await some_changes(rig, streams, long_prompt, dice)
            assert [one.tokens for one in await results(rig, *streams)] == expected, f"seed {SEED}, {done} changes"
            (again,) = await results(rig, submit(rig, long_prompt, max_new_tokens=4))
            assert again.tokens == late_expected.tokens
        if layout.layer_ranges != (await now(rig)).layout.layer_ranges:
            await reshape(rig, counts_of(layout.layer_ranges), CommitMode.DRAIN)
        await rig.engine.check_integrity()
        books.append(await settled_books(rig))
    print(f"{done} changes; books {books}")
    for (threads, files, resident), (threads_now, files_now, resident_now) in zip(*books, strict=True):
        assert threads_now <= threads + 2
        assert files_now <= files + 12
        assert resident_now < resident + RSS_GROWTH_BYTES_MAX


async def some_changes(rig: Rig, streams: Sequence[Stream], long_prompt: Sequence[int], dice: random.Random) -> int:
    """As many as `ROUND_CHANGES` while these streams run; how many there were."""
    layout = (await now(rig)).layout
    layers, stages, done, late = layout.layer_ranges[-1][1], len(layout.layer_ranges), 0, list[Stream]()
    for _ in range(ROUND_CHANGES):
        if any(stream.finish is not None for stream in streams):
            break
        target = some_split(dice, layers, stages)
        if target == counts_of((await now(rig)).layout.layer_ranges):
            continue
        done += 1
        if dice.randrange(10) < ABORTS_OF_TEN:
            change = await begin(rig, target)
            await reconfigurable(rig).load_weights(change.change_id)
            await reconfigurable(rig).start_kv_migration(change.change_id, None)
            await reconfigurable(rig).abort_layout(change.change_id)
        else:
            late.append(submit(rig, [dice.randrange(*rig.token_range), *long_prompt], max_new_tokens=4))
            await reshape(rig, target, dice.choice(list(CommitMode)))
        await go_on(rig, streams, 3)
        await rig.engine.check_integrity()
    await results(rig, *late)
    return done


async def test_three_stages(random_llama: Path, tmp_path: Path) -> None:
    async with moving(random_llama, tmp_path, pipeline_stages=3, capacity_tokens=4000) as rig:
        prompts = [rig.prompt(size) for size in (20, 70, 130, 44, 9)]
        await many_changes(rig, prompts, TOKENS, CHANGES)
        await rig.settle()


async def test_stacked_layers(random_llama: Path, tmp_path: Path) -> None:
    """Only at the boundaries of groups."""
    settings = {"pipeline_stages": 2, "capacity_tokens": 3200, "layers_per_group": 2}
    async with moving(random_llama, tmp_path, **settings) as rig:
        dice, prompts = random.Random(SEED), [rig.prompt(size) for size in (20, 70, 130, 44)]
        expected = [one.tokens for one in await results(rig, *start_streams(rig, prompts, TOKENS))]
        assert isinstance(rig.engine, ResizableEngine)
        streams, committed = start_streams(rig, prompts, TOKENS), (await rig.engine.kv_memory()).units
        for _ in range(8):
            target = some_split(dice, 8, 2, 2)
            if target != counts_of((await now(rig)).layout.layer_ranges):
                await reshape(rig, target, dice.choice(list(CommitMode)))
            await rig.engine.resize_kv(dice.choice((2400, 3200)))
            await go_on(rig, streams, 3)
            await rig.engine.check_integrity()
        assert [one.tokens for one in await results(rig, *streams)] == expected
        await rig.engine.resize_kv(3200)
        units = (await rig.engine.kv_memory()).units
        assert units is not None
        assert committed is not None
        assert (units.groups, units.committed) == (committed.groups, committed.committed)
        await rig.settle()


async def test_the_chat_model(smollm2: Path, tmp_path: Path) -> None:
    async with moving(smollm2, tmp_path, pipeline_stages=2, capacity_tokens=4000) as rig:
        prompts = [rig.prompt(size) for size in (20, 70, 130, 44)]
        await many_changes(rig, prompts, 160, 20)
        await rig.settle()


async def test_the_chat_model_in_three(smollm2: Path, tmp_path: Path) -> None:
    async with moving(smollm2, tmp_path, pipeline_stages=3, capacity_tokens=3000) as rig:
        prompts = [rig.prompt(size) for size in (20, 70, 130, 44)]
        await many_changes(rig, prompts, 160, 12)
        await rig.settle()


async def test_a_stage_that_starts_empty_gets_layers(random_llama: Path, tmp_path: Path) -> None:
    """One to three stages, and back."""
    settings = {"pipeline_stages": 3, "layer_partition": (8, 0, 0), "capacity_tokens": 3000}
    async with moving(random_llama, tmp_path, **settings) as rig:
        prompts = [rig.prompt(size) for size in (20, 70, 130, 44)]
        expected = [one.tokens for one in await results(rig, *start_streams(rig, prompts, TOKENS))]
        streams = start_streams(rig, prompts, TOKENS)
        await go_on(rig, streams)
        for target in ((3, 3, 2), (0, 8, 0), (8, 0, 0)):
            for mode in CommitMode:
                if target != counts_of((await now(rig)).layout.layer_ranges):
                    await reshape(rig, target, mode)
            await go_on(rig, streams, 3)
        assert [one.tokens for one in await results(rig, *streams)] == expected
        await rig.settle()
