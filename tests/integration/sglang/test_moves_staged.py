"""Requests move between one rank and two pipeline stages, between page size 1 and 16, with and without prefix cache."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.contract.engine_kit import MovePair, Rig
from tests.contract.engine_move_suite import EngineMoveSuite
from tests.integration.sglang.conftest import CAPACITY_TOKENS, moving, pair_of
from tests.integration.sglang.journeys import JourneySuite

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="session")]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def staged_engine(random_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    async with moving(
        random_llama,
        tmp_path_factory.mktemp("staged"),
        capacity_tokens=CAPACITY_TOKENS // 16 * 16,
        pipeline_stages=2,
        layer_partition=(5, 3),
        page_size=16,
        radix_cache=False,
    ) as rig:
        yield rig


@pytest_asyncio.fixture(loop_scope="session", params=["there", "back"])
async def pair(request: pytest.FixtureRequest, base_engine: Rig, staged_engine: Rig) -> AsyncIterator[MovePair]:
    pair = pair_of(base_engine, staged_engine)
    yield pair if request.param == "there" else pair.reversed()
    await pair.settle()


class TestMoves(EngineMoveSuite):
    """All of it, in both directions."""

    async def test_preempted_while_moving(self, pair: MovePair) -> None:
        if pair.source.info.pipeline_stages > 1:
            pytest.skip("SGLang preempts within a micro-batch only, and ends the last request of one")
        await super().test_preempted_while_moving(pair)


class TestJourneys(JourneySuite):
    """To and fro."""
