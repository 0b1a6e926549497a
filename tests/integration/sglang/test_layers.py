"""Layers move between two stages while requests run: the same tokens, the same KV, and nothing is left over."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from meshift.backends.base import Capability, KvMemoryNow, MoveKey, MoveRefused, Refusal, ResizableEngine
from meshift.backends.layouts import LayoutRefused
from meshift.backends.sglang.engine import SglangEngine
from meshift.schemas.layouts import CommitMode, LayoutFlags, LayoutRefusal, counts_of
from tests.contract.engine_kit import Rig
from tests.integration.sglang.conftest import moving
from tests.integration.sglang.generation import compare, generate, results, submit
from tests.integration.sglang.layer_changes import (
    begin,
    commit,
    converged,
    go_on,
    now,
    prepare,
    reconfigurable,
    reshape,
    start_streams,
)

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="session")]

CAPACITY = 4000
EVEN = (4, 4)
TOUR = [(2, 6), (7, 1), (8, 0), (0, 8), (4, 4)]
"""Boundaries both ways, by one layer and by all, to stages without any, and back."""

TOKENS = 130
SIZES = (20, 60, 100, 140, 5, 33)
LONG_PROMPT = 1300
"""Some chunks of prefill."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def staged_engine(random_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    log_dir = tmp_path_factory.mktemp("layers")
    async with moving(random_llama, log_dir, pipeline_stages=2, layer_partition=EVEN, capacity_tokens=CAPACITY) as rig:
        yield rig


@pytest_asyncio.fixture(loop_scope="session")
async def staged(staged_engine: Rig) -> AsyncIterator[Rig]:
    """Two stages of four layers each, left so, idle and whole by each test."""
    yield staged_engine
    layout = await now(staged_engine)
    assert layout.change_id is None
    if counts_of(layout.layout.layer_ranges) != EVEN:
        await reshape(staged_engine, EVEN, CommitMode.DRAIN)
    await staged_engine.settle()


async def memory(rig: Rig) -> KvMemoryNow:
    assert isinstance(rig.engine, ResizableEngine)
    return await rig.engine.kv_memory()


@pytest.mark.parametrize("mode", list(CommitMode))
async def test_streams_go_on_unchanged(staged: Rig, mode: CommitMode) -> None:
    assert Capability.CHANGE_LAYOUT in staged.info.capabilities
    prompts = [staged.prompt(size) for size in SIZES]
    late = [staged.prompt(LONG_PROMPT + 7 * index) for index in range(len(TOUR))]
    undisturbed = await results(staged, *start_streams(staged, prompts, TOKENS))
    alone = [await generate(staged, prompt, max_new_tokens=6) for prompt in late]
    streams, arrivals = start_streams(staged, prompts, TOKENS), []
    await go_on(staged, streams)
    for layers, prompt in zip(TOUR, late, strict=True):
        change = await prepare(staged, layers)
        # Its prefill, some chunks of it, meets the commit.
        arrivals.append(submit(staged, prompt, max_new_tokens=6))
        done = await commit(staged, change, mode)
        assert done.commit is mode
        await go_on(staged, streams)
        await staged.engine.check_integrity()
    found = await results(staged, *streams, *arrivals)
    assert [result.tokens for result in found] == [result.tokens for result in (*undisturbed, *alone)]
    assert not any(result.finish.preemptions for result in found)


@pytest.mark.parametrize(
    "flags", [LayoutFlags(no_patch=True), LayoutFlags(no_patch=True, no_async=True)], ids=["no-patch", "no-async"]
)
async def test_what_is_left_for_the_commit(staged: Rig, flags: LayoutFlags) -> None:
    prompts = [staged.prompt(size) for size in SIZES]
    undisturbed = await results(staged, *start_streams(staged, prompts, 40))
    streams = start_streams(staged, prompts, 40)
    await go_on(staged, streams)
    change = await begin(staged, (6, 2), flags=flags)
    if not flags.no_async:
        await reconfigurable(staged).load_weights(change.change_id)
        async with asyncio.timeout(staged.timeout_s):
            while not (await reconfigurable(staged).layout_progress(change.change_id)).weights_loaded:
                await asyncio.sleep(0.01)
    done = await commit(staged, change, CommitMode.LAG)
    assert (done.commit, done.last_patch_tokens) == (CommitMode.DRAIN, 0)
    assert [result.tokens for result in await results(staged, *streams)] == [one.tokens for one in undisturbed]


async def test_one_engine_is_as_good_as_another(base: Rig, staged: Rig) -> None:
    await reshape(staged, (1, 7), CommitMode.LAG)
    await compare(base, staged)


async def test_memory_is_that_of_the_layers(staged: Rig) -> None:
    """KV of all layers together is the same in every layout, and twice a layer's only while it moves."""
    await generate(staged, staged.prompt(2000), max_new_tokens=2)
    before = (await memory(staged)).resident_bytes
    change = await prepare(staged, (8, 0))
    during = (await memory(staged)).resident_bytes
    assert during > 1.2 * before
    await commit(staged, change, CommitMode.DRAIN)
    await reshape(staged, EVEN, CommitMode.DRAIN)
    after = (await memory(staged)).resident_bytes
    assert abs(after - before) < 0.1 * before
    change = await prepare(staged, (2, 6))
    await reconfigurable(staged).abort_layout(change.change_id)
    assert abs((await memory(staged)).resident_bytes - before) < 0.1 * before


async def undone(rig: Rig, change_id: str, refusal: LayoutRefusal) -> None:
    layout = await now(rig)
    assert layout.change_id is None
    assert counts_of(layout.layout.layer_ranges) == EVEN
    assert [end.refusal for end in layout.ended if end.change_id == change_id] == [refusal]


async def test_an_abort_in_every_phase(staged: Rig) -> None:
    prompts = [staged.prompt(size) for size in SIZES]
    undisturbed = await results(staged, *start_streams(staged, prompts, TOKENS))
    streams, engine = start_streams(staged, prompts, TOKENS), reconfigurable(staged)
    await go_on(staged, streams)
    for phase in ("begun", "loading", "copying", "converged"):
        change = await begin(staged, (1, 7))
        if phase != "begun":
            await engine.load_weights(change.change_id)
        if phase in ("copying", "converged"):
            await engine.start_kv_migration(change.change_id, 1e6 if phase == "copying" else None)
        if phase == "converged":
            await converged(staged, change)
        await engine.abort_layout(change.change_id)
        await engine.abort_layout(change.change_id)
        await undone(staged, change.change_id, LayoutRefusal.CANCELLED)
        with pytest.raises(LayoutRefused):
            await engine.commit_layout(change.change_id, CommitMode.DRAIN, 1.0)
        await staged.engine.check_integrity()
        await go_on(staged, streams, 3)
    await reshape(staged, (1, 7), CommitMode.DRAIN)
    assert [result.tokens for result in await results(staged, *streams)] == [one.tokens for one in undisturbed]


async def test_an_abort_while_it_drains(staged: Rig) -> None:
    prompts = [staged.prompt(size) for size in SIZES]
    undisturbed = await results(staged, *start_streams(staged, prompts, 60))
    streams, engine = start_streams(staged, prompts, 60), reconfigurable(staged)
    await go_on(staged, streams)
    change = await prepare(staged, (1, 7))
    committing = asyncio.ensure_future(commit(staged, change, CommitMode.DRAIN))
    await asyncio.sleep(0)
    await engine.abort_layout(change.change_id)
    with pytest.raises(LayoutRefused, match="aborted"):
        await committing
    await undone(staged, change.change_id, LayoutRefusal.CANCELLED)
    assert [result.tokens for result in await results(staged, *streams)] == [one.tokens for one in undisturbed]


async def test_what_isnt_committed_in_time_is_undone_by_the_ranks(staged: Rig) -> None:
    stream = submit(staged, staged.prompt(30), max_new_tokens=60)
    change = await prepare(staged, (3, 5), deadline_s=0.5)
    async with asyncio.timeout(staged.timeout_s):
        while (await now(staged)).change_id is not None:
            await asyncio.sleep(0.02)
    await undone(staged, change.change_id, LayoutRefusal.DEADLINE)
    with pytest.raises(LayoutRefused):
        await reconfigurable(staged).commit_layout(change.change_id, CommitMode.LAG, 1.0)
    await results(staged, stream)


async def test_a_transfer_that_breaks_leaves_all_as_it_was(staged: Rig) -> None:
    """The rate is so small that it can't come to an end; a drain that is to be ready at once is taken back."""
    streams = [submit(staged, staged.prompt(200), max_new_tokens=60) for _ in range(4)]
    await go_on(staged, streams)
    change, engine = await begin(staged, (1, 7)), reconfigurable(staged)
    await engine.load_weights(change.change_id)
    await engine.start_kv_migration(change.change_id, 1e5)
    async with asyncio.timeout(staged.timeout_s):
        while not (await engine.layout_progress(change.change_id)).weights_loaded:
            await asyncio.sleep(0.01)
    with pytest.raises(LayoutRefused) as caught:
        await engine.commit_layout(change.change_id, CommitMode.DRAIN, 0.2)
    assert caught.value.refusal is LayoutRefusal.DEADLINE
    await go_on(staged, streams)
    assert (await engine.layout_progress(change.change_id)).failure != ""
    await engine.abort_layout(change.change_id)
    await undone(staged, change.change_id, LayoutRefusal.CANCELLED)
    await results(staged, *streams)


async def test_capacity_only_shrinks_meanwhile(staged: Rig) -> None:
    engine = staged.engine
    assert isinstance(engine, SglangEngine)
    change = await begin(staged, (2, 6))
    shrunk = await engine.resize_kv(3000)
    assert (shrunk.capacity, shrunk.reason) == (3000, "")
    refused = await engine.resize_kv(CAPACITY)
    assert (refused.capacity, refused.reason) == (3000, "layers move")
    await engine.abort_layout(change.change_id)
    assert (await engine.resize_kv(CAPACITY)).capacity == CAPACITY


async def test_a_request_that_moves_away_stays_if_layers_move(base: Rig, staged: Rig) -> None:
    source, destination = staged.engine, base.engine
    assert isinstance(source, SglangEngine)
    assert isinstance(destination, SglangEngine)
    prompt = staged.prompt(50)
    whole = await generate(staged, prompt, max_new_tokens=60)
    stream = submit(staged, prompt, max_new_tokens=60)
    await staged.produced(stream, 3)
    (request,) = [key for key, its in staged.listener.streams.items() if its is stream]
    key = MoveKey(request.request_id, request.attempt, request.hop + 1)
    begun = await source.begin_move(key)
    layout = await now(staged)
    assert layout.kv is not None
    reserved = await destination.reserve(key, layout.kv, begun.tokens, 200, 60.0)
    await source.send_delta(key, reserved.cached, reserved)
    await reshape(staged, (6, 2), CommitMode.LAG)
    with pytest.raises(MoveRefused) as caught:
        await source.freeze(key, reserved.cached, reserved)
    assert caught.value.refusal is Refusal.BROKEN
    await source.resume(key, request.attempt)
    await destination.abort(key)
    (result,) = await results(staged, stream)
    assert result.tokens == whole.tokens


async def test_a_frozen_request_holds_a_commit_up(staged: Rig) -> None:
    engine = staged.engine
    assert isinstance(engine, SglangEngine)
    stream = submit(staged, staged.prompt(30), max_new_tokens=40)
    await staged.produced(stream, 3)
    (request,) = [key for key, its in staged.listener.streams.items() if its is stream]
    key = MoveKey(request.request_id, request.attempt, request.hop + 1)
    await engine.begin_move(key)
    await engine.freeze(key, 0, None)
    change = await prepare(staged, (5, 3))
    with pytest.raises(LayoutRefused) as caught:
        await engine.commit_layout(change.change_id, CommitMode.DRAIN, 5.0)
    assert caught.value.refusal is LayoutRefusal.BUSY
    await engine.resume(key, request.attempt)
    await commit(staged, change, CommitMode.DRAIN)
    await results(staged, stream)
