"""The overlap scheduler, with KV in units of four layers and pages of 16 tokens: exact too, though its penalties lag by
a token."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.contract.engine_kit import Rig
from tests.contract.engine_resize_suite import EngineResizeSuite, resize
from tests.contract.engine_suite import EngineGenerationSuite
from tests.integration.sglang.conftest import running
from tests.integration.sglang.generation import KINDS, check_resumes, generate, results, submit

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="session")]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def overlapped_engine(random_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    async with running(random_llama, tmp_path_factory.mktemp("overlap"), overlap=True, layers_per_group=4) as rig:
        assert rig.info.page_size == 16
        yield rig


@pytest_asyncio.fixture(loop_scope="session")
async def overlapped(overlapped_engine: Rig) -> AsyncIterator[Rig]:
    """Left idle, whole, and of its first capacity by each test."""
    yield overlapped_engine
    if overlapped_engine.engine.load().capacity != overlapped_engine.info.capacity:
        await resize(overlapped_engine, overlapped_engine.info.capacity)
    await overlapped_engine.settle()


class TestGeneration(EngineGenerationSuite):
    @pytest.fixture
    def rig(self, overlapped: Rig) -> Rig:
        return overlapped


class TestResizes(EngineResizeSuite):
    """A step with those that have to go is always launched."""

    @pytest.fixture
    def rig(self, overlapped: Rig) -> Rig:
        return overlapped


@pytest.mark.parametrize("fields", KINDS, ids=lambda fields: "+".join(fields) or "greedy")
async def test_resume(overlapped: Rig, fields: dict[str, Any]) -> None:
    await check_resumes(overlapped, overlapped.prompt(), cuts=(1, 2, 21), **fields)


async def test_what_needs_no_history_is_as_without_overlap(base: Rig, overlapped: Rig) -> None:
    prompt = base.prompt()
    assert (await generate(base, prompt)).tokens == (await generate(overlapped, prompt)).tokens


async def test_the_longest_request_runs(overlapped: Rig) -> None:
    longest = overlapped.info.model.context_tokens_max
    streams = [submit(overlapped, overlapped.prompt(longest - 3), max_new_tokens=3) for _ in range(2)]
    assert [len(result.tokens) for result in await results(overlapped, *streams)] == [3, 3]
