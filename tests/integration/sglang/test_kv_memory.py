"""KV memory in units of an arena: the same tokens for every stacking, and a capacity that changes while it serves."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from meshift.backends.base import KvResized, ResizableEngine
from meshift.schemas.errors import ContextTooLong
from tests.contract.engine_kit import Rig
from tests.integration.sglang.conftest import running
from tests.integration.sglang.generation import Result, compare, generate, results, submit

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="session")]

START, GROWN = 1200, 2400
TOKEN_BYTES = 8 * 2 * 2 * 32 * 4
"""Of the random model: layers, K and V, heads, their size, float32."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stacked_engine(random_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    settings = {"layers_per_group": 4, "capacity_tokens": START, "capacity_tokens_max": GROWN}
    async with running(random_llama, tmp_path_factory.mktemp("stacked"), **settings) as rig:
        yield rig


@pytest_asyncio.fixture(loop_scope="session")
async def stacked(stacked_engine: Rig) -> AsyncIterator[Rig]:
    """Four layers a group, left idle, whole, and at its first capacity by each test."""
    yield stacked_engine
    await resize(stacked_engine, START)
    await stacked_engine.settle()


async def resize(rig: Rig, capacity: int, **options: Any) -> KvResized:
    """Resize, and see that the books agree at once."""
    assert isinstance(rig.engine, ResizableEngine)
    answer = await rig.engine.resize_kv(capacity, **options)
    print(answer)
    await rig.engine.check_integrity()
    load = rig.engine.load()
    assert load.used + load.cached + load.free + load.reserved == load.capacity == answer.capacity
    return answer


async def test_stacking_changes_no_token(base: Rig, stacked: Rig) -> None:
    assert (stacked.info.page_size, stacked.info.capacity) == (16, START)
    await compare(base, stacked)


@pytest.mark.parametrize("k", [1, 2, 8])
async def test_other_stackings(k: int, base: Rig, random_llama: Path, tmp_path: Path) -> None:
    async with running(random_llama, tmp_path, layers_per_group=k, chunked_prefill_size=64) as rig:
        await compare(base, rig)
        shared = base.prompt(100)
        prompts = [shared + base.prompt(size) for size in (1, 20, 40)]
        expected = [await generate(base, prompt) for prompt in prompts]
        again = [await generate(rig, prompt) for prompt in prompts]
        assert [result.tokens for result in again] == [result.tokens for result in expected]
        assert again[-1].finish.cached_tokens >= 96
        await rig.settle()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def staged_engine(random_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    settings = {"layers_per_group": 3, "pipeline_stages": 2, "capacity_tokens": START, "capacity_tokens_max": GROWN}
    async with running(random_llama, tmp_path_factory.mktemp("staged"), **settings) as rig:
        yield rig


@pytest_asyncio.fixture(loop_scope="session")
async def staged(staged_engine: Rig) -> AsyncIterator[Rig]:
    """Two stages of six and two layers, left idle, whole, and at their first capacity by each test."""
    yield staged_engine
    await resize(staged_engine, START)
    await staged_engine.settle()


async def test_two_stages_of_whole_groups(base: Rig, staged: Rig) -> None:
    await compare(base, staged)
    streams = [submit(staged, staged.prompt(30), max_new_tokens=60) for _ in range(4)]
    await staged.produced(streams[0], 3)
    assert (await resize(staged, GROWN)).capacity == GROWN
    assert (await resize(staged, 640)).capacity >= 640
    await results(staged, *streams)


async def test_stages_preempt_alike(base: Rig, staged: Rig) -> None:
    """Those that go are in both micro-batches, of which one is always being computed."""
    prompts = [staged.prompt(150) for _ in range(4)]
    alone = [await generate(base, prompt, max_new_tokens=70) for prompt in prompts]
    streams = [submit(staged, prompt, max_new_tokens=70) for prompt in prompts]
    for stream in streams:
        await staged.produced(stream, 1)
    held = await resize(staged, 320)
    assert (held.preempted, held.capacity >= 600) == (0, True)
    small = await resize(staged, 320, preempt=True)
    assert (small.capacity, small.reason) == (320, "")
    assert small.preempted >= 2
    found: list[Result] = await results(staged, *streams)
    assert [result.tokens for result in found] == [result.tokens for result in alone]
    assert sum(result.finish.preemptions for result in found) >= small.preempted


async def test_stages_resize_and_serve_at_random(base: Rig, staged: Rig) -> None:
    assert isinstance(staged.engine, ResizableEngine)
    dice = staged.random
    prompts = [staged.prompt(dice.randint(5, 150)) for _ in range(12)]
    lengths = [dice.randint(5, 60) for _ in prompts]
    expected = await results(
        base, *(submit(base, one, max_new_tokens=size) for one, size in zip(prompts, lengths, strict=True))
    )
    streams = []
    for prompt, size in zip(prompts, lengths, strict=True):
        streams.append(submit(staged, prompt, max_new_tokens=size))
        wanted = [dice.randint(300, GROWN) for _ in range(dice.randint(1, 3))]
        await asyncio.gather(*(staged.engine.resize_kv(one, preempt=True) for one in wanted))
        await staged.engine.check_integrity()
    found = await results(staged, *streams)
    assert [result.tokens for result in found] == [result.tokens for result in expected]


async def test_two_tensor_ranks(base: Rig, random_llama: Path, tmp_path: Path) -> None:
    async with running(random_llama, tmp_path, layers_per_group=4, tensor_ranks=2) as rig:
        await compare(base, rig)
        assert (await resize(rig, 800)).capacity == 800
        await rig.settle()


async def test_memory_goes_and_comes_while_it_serves(stacked: Rig) -> None:
    prompts = [stacked.prompt(60) for _ in range(4)]
    expected = [await generate(stacked, prompt) for prompt in prompts]
    streams = [submit(stacked, prompt) for prompt in prompts]
    await stacked.produced(streams[0], 2)
    for capacity in (800, GROWN, 640, START):
        answer = await resize(stacked, capacity)
        assert (answer.capacity, answer.preempted, answer.reason) == (capacity, 0, "")
    found = await results(stacked, *streams)
    assert [result.tokens for result in found] == [result.tokens for result in expected]


async def test_units_go_back_to_the_system(stacked: Rig) -> None:
    await resize(stacked, GROWN)
    fillers = [submit(stacked, stacked.prompt(400), max_new_tokens=2) for _ in range(6)]
    await results(stacked, *fillers)
    full = await resize(stacked, GROWN)
    half = await resize(stacked, GROWN // 2)
    assert half.released_bytes == GROWN // 2 * TOKEN_BYTES
    assert half.evicted > 0
    assert full.resident_bytes - half.resident_bytes > 0.5 * half.released_bytes
    assert half.resident_bytes <= (GROWN // 2 + 16) * TOKEN_BYTES


async def test_what_there_is_is_told(stacked: Rig) -> None:
    assert isinstance(stacked.engine, ResizableEngine)
    for capacity in (GROWN, START):
        done = await resize(stacked, capacity)
        now = await stacked.engine.kv_memory()
        units = now.units
        assert units is not None
        assert units == done.units
        assert (units.layers_per_group, units.groups, units.last_group_layers, units.page_tokens) == (4, 2, 4, 16)
        assert units.unit_bytes == 16 * TOKEN_BYTES // 2
        assert (units.committed, units.units) == (2 * (capacity // 16 + 1), 2 * (GROWN // 16 + 1))
        assert (units.unit_waste_bytes, units.waste_bytes) == (0, 0)
        assert 0 < now.resident_bytes <= units.committed_bytes == units.committed * units.unit_bytes
        assert now.request_tokens_max == done.request_tokens_max


async def test_without_units_it_is_one_slab(base: Rig) -> None:
    assert isinstance(base.engine, ResizableEngine)
    now = await base.engine.kv_memory()
    assert now.units is None
    assert 0 < now.resident_bytes <= (base.info.capacity + 1) * TOKEN_BYTES


async def test_prefixes_go_first_then_only_what_may(stacked: Rig) -> None:
    await generate(stacked, stacked.prompt(500), max_new_tokens=2)
    prompts = [stacked.prompt(150) for _ in range(4)]
    alone = [await generate(stacked, prompt, max_new_tokens=70) for prompt in prompts]
    streams = [submit(stacked, prompt, max_new_tokens=70) for prompt in prompts]
    for stream in streams:
        await stacked.produced(stream, 1)
    held = await resize(stacked, 320)
    assert held.evicted > 0
    assert held.preempted == 0
    assert 600 <= held.capacity < START
    assert "hold" in held.reason
    preempted = await resize(stacked, 320, preempt=True)
    assert preempted.preempted > 0
    assert preempted.capacity == 320
    found: list[Result] = await results(stacked, *streams)
    assert [result.tokens for result in found] == [result.tokens for result in alone]
    assert sum(result.finish.preemptions for result in found) >= preempted.preempted


async def test_never_below_what_a_request_needs(stacked: Rig) -> None:
    stream = submit(stacked, stacked.prompt(200), max_new_tokens=100)
    await stacked.produced(stream, 1)
    answer = await resize(stacked, 64, preempt=True)
    assert 300 <= answer.capacity < 400
    assert "may need" in answer.reason
    (result,) = await results(stacked, stream)
    assert len(result.tokens) == 100
    small = await resize(stacked, 64)
    assert small.capacity == 64
    with pytest.raises(ContextTooLong):
        submit(stacked, stacked.prompt(100))
    beyond = await resize(stacked, 10 * GROWN)
    assert (beyond.capacity, "no more room" in beyond.reason) == (GROWN, True)


async def test_resizes_and_requests_at_random(stacked: Rig) -> None:
    dice = stacked.random
    prompts = [stacked.prompt(dice.randint(5, 150)) for _ in range(14)]
    lengths = [dice.randint(5, 60) for _ in prompts]
    expected = [await generate(stacked, one, max_new_tokens=size) for one, size in zip(prompts, lengths, strict=True)]
    streams = []
    for prompt, size in zip(prompts, lengths, strict=True):
        streams.append(submit(stacked, prompt, max_new_tokens=size))
        await asyncio.sleep(0.02)
        await resize(stacked, dice.randint(300, GROWN), preempt=dice.random() < 0.5)
    found = await results(stacked, *streams)
    assert [result.tokens for result in found] == [result.tokens for result in expected]
