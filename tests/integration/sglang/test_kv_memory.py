"""KV memory in units of an arena: the same tokens for every stacking, and a capacity that changes while it serves."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from meshift.backends.base import ResizableEngine
from tests.contract.engine_kit import Rig
from tests.contract.engine_resize_suite import EngineResizeSuite, resize
from tests.integration.sglang.conftest import running
from tests.integration.sglang.generation import compare, generate, results, submit

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


async def test_stacking_changes_no_token(base: Rig, stacked: Rig) -> None:
    assert (stacked.info.page_size, stacked.info.capacity) == (16, START)
    await compare(base, stacked)


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
    assert (await resize(staged, GROWN)).capacity == GROWN


class TestResizesOfTwoStages(EngineResizeSuite):
    """Those that have to go are in both micro-batches, of which one is always being computed."""

    @pytest.fixture
    def rig(self, staged: Rig) -> Rig:
        return staged


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


async def test_prefixes_go_first(stacked: Rig) -> None:
    await generate(stacked, stacked.prompt(500), max_new_tokens=2)
    streams = [submit(stacked, stacked.prompt(150), max_new_tokens=40) for _ in range(3)]
    for stream in streams:
        await stacked.produced(stream, 1)
    held = await resize(stacked, 640)
    assert (held.capacity, held.preempted, held.evicted > 0, held.reason) == (640, 0, True, "")
    await results(stacked, *streams)
