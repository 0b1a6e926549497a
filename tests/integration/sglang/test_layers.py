"""Layers move between two stages while requests run: the same tokens, the same KV, and nothing is left over."""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from meshift.backends.base import Capability, KvMemoryNow, MoveKey, MoveRefused, Refusal, ResizableEngine
from meshift.backends.layouts import LayoutChange, LayoutRefused
from meshift.backends.sglang.engine import SglangEngine
from meshift.schemas.layouts import CommitMode, LayoutRefusal, counts_of
from tests.contract.engine_kit import Rig, Stream
from tests.contract.engine_layout_suite import EngineLayoutSuite, LayoutRig
from tests.integration.sglang.conftest import SEED, moving
from tests.integration.sglang.generation import generate, results, submit
from tests.integration.sglang.layer_changes import (
    POLL_S,
    begin,
    commit,
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

SIZES = (20, 60, 140, 5, 33)
TOKENS, SHORT, SUITE_TOKENS = 110, 50, 40
TOKEN_BYTES = 8 * 2 * 2 * 32 * 4
"""Of the random model: layers, K and V, heads, their size, float32."""

LONG_PROMPT = 1100
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


class TestLayouts(EngineLayoutSuite):
    @pytest_asyncio.fixture(loop_scope="session")
    async def rig(self, staged_engine: Rig) -> AsyncIterator[LayoutRig]:
        tokens, staged_engine.long_tokens = staged_engine.long_tokens, SUITE_TOKENS
        rig = LayoutRig(staged_engine, supports_restart=False)
        yield rig
        await rig.settle()
        staged_engine.long_tokens = tokens


@dataclass(frozen=True)
class Scene:
    """Prompts, and what an engine that nobody disturbs makes of them, each sampled in its way."""

    prompts: list[list[int]]
    expected: list[list[int]]
    late: list[int]
    late_expected: list[int]

    def start(self, rig: Rig, tokens: int = TOKENS) -> list[Stream]:
        """Streams of all prompts."""
        return start_streams(rig, self.prompts, tokens)

    async def check(self, rig: Rig, streams: list[Stream]) -> None:
        """They end, and are what they should be."""
        found = await results(rig, *streams)
        for result, expected in zip(found, self.expected, strict=True):
            assert result.tokens == expected[: len(result.tokens)]
            assert len(result.tokens) in (TOKENS, SHORT)
        assert not any(result.finish.preemptions for result in found)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def scene(staged_engine: Rig) -> Scene:
    rig, dice = staged_engine, random.Random(SEED)
    prompts = [[dice.randrange(*rig.token_range) for _ in range(size)] for size in (*SIZES, LONG_PROMPT)]
    *several, late = prompts
    expected = [one.tokens for one in await results(rig, *start_streams(rig, several, TOKENS))]
    return Scene(several, expected, late, (await generate(rig, late, max_new_tokens=6)).tokens)


async def load(rig: Rig, change: LayoutChange) -> None:
    """All weights, and nothing else."""
    await reconfigurable(rig).load_weights(change.change_id)
    async with asyncio.timeout(rig.timeout_s):
        while not (await reconfigurable(rig).layout_progress(change.change_id)).weights_loaded:
            await asyncio.sleep(POLL_S)


async def memory(rig: Rig) -> KvMemoryNow:
    assert isinstance(rig.engine, ResizableEngine)
    return await rig.engine.kv_memory()


@pytest.mark.parametrize("mode", list(CommitMode))
async def test_streams_go_on_unchanged(staged: Rig, scene: Scene, mode: CommitMode) -> None:
    assert Capability.CHANGE_LAYOUT in staged.info.capabilities
    streams, arrivals = scene.start(staged), []
    await go_on(staged, streams)
    for number, layers in enumerate(TOUR):
        change = await prepare(staged, layers)
        if number in (0, 2):
            # Some chunks of its prefill meet the commit.
            arrivals.append(submit(staged, [number, *scene.late], max_new_tokens=6))
        done = await commit(staged, change, mode)
        assert done.commit is mode
        await go_on(staged, streams)
        await staged.engine.check_integrity()
    await scene.check(staged, streams)
    for number, result in zip((0, 2), await results(staged, *arrivals), strict=True):
        # What was cached in several layouts is read again.
        again = await generate(staged, [number, *scene.late], max_new_tokens=6)
        assert again.tokens == result.tokens
        assert again.finish.cached_tokens >= LONG_PROMPT
    assert (await generate(staged, scene.late, max_new_tokens=6)).tokens == scene.late_expected


async def test_memory_is_that_of_the_layers(staged: Rig) -> None:
    """That of layers which move is there twice only while they do; afterwards there is what lives, and no more."""
    await generate(staged, staged.prompt(2000), max_new_tokens=2)
    before = (await memory(staged)).resident_bytes
    load_now = staged.engine.load()
    live = (load_now.used + load_now.cached) * TOKEN_BYTES
    change = await prepare(staged, (8, 0))
    during = (await memory(staged)).resident_bytes
    assert during > before + 0.9 * live / 2
    await commit(staged, change, CommitMode.DRAIN)
    await reshape(staged, EVEN, CommitMode.DRAIN)
    change = await prepare(staged, (2, 6))
    await reconfigurable(staged).abort_layout(change.change_id)
    after = (await memory(staged)).resident_bytes
    assert 0.9 * live < after < 1.1 * before


async def undone(rig: Rig, change_id: str, refusal: LayoutRefusal) -> None:
    layout = await now(rig)
    assert layout.change_id is None
    assert counts_of(layout.layout.layer_ranges) == EVEN
    assert [end.refusal for end in layout.ended if end.change_id == change_id] == [refusal]


async def test_an_abort_while_it_drains(staged: Rig, scene: Scene) -> None:
    streams, engine = scene.start(staged, SHORT), reconfigurable(staged)
    await go_on(staged, streams)
    change = await prepare(staged, (1, 7))
    committing = asyncio.ensure_future(commit(staged, change, CommitMode.DRAIN))
    await asyncio.sleep(0)
    await engine.abort_layout(change.change_id)
    with pytest.raises(LayoutRefused, match="aborted"):
        await committing
    await undone(staged, change.change_id, LayoutRefusal.CANCELLED)
    await scene.check(staged, streams)


async def test_a_drain_that_takes_too_long_is_taken_back(staged: Rig, scene: Scene) -> None:
    """The rate is so small that it can't come to an end."""
    streams = scene.start(staged)
    await go_on(staged, streams)
    change, engine = await begin(staged, (1, 7)), reconfigurable(staged)
    await load(staged, change)
    await engine.start_kv_migration(change.change_id, 1e5)
    with pytest.raises(LayoutRefused) as caught:
        await engine.commit_layout(change.change_id, CommitMode.DRAIN, 0.2)
    assert caught.value.refusal is LayoutRefusal.DEADLINE
    await go_on(staged, streams)
    assert (await engine.layout_progress(change.change_id)).failure != ""
    await engine.abort_layout(change.change_id)
    await undone(staged, change.change_id, LayoutRefusal.CANCELLED)
    await scene.check(staged, streams)


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
