"""Requests move from and to an engine with the overlap scheduler, and from it to itself."""

import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.contract.engine_kit import MovePair, Rig
from tests.contract.engine_move_suite import EngineMoveSuite
from tests.integration.sglang.conftest import CAPACITY_TOKENS, moving, pair_of
from tests.integration.sglang.generation import PENALTIES
from tests.integration.sglang.journeys import SEEDS, TOKENS, JourneySuite
from tests.integration.sglang.moving import check_equal, travel, undisturbed

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="session")]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def overlapping(random_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    folder = tmp_path_factory.mktemp("overlapping")
    async with moving(random_llama, folder, capacity_tokens=CAPACITY_TOKENS, overlap=True) as rig:
        yield rig


@pytest_asyncio.fixture(loop_scope="session", params=["there", "back"])
async def pair(request: pytest.FixtureRequest, base_engine: Rig, overlapping: Rig) -> AsyncIterator[MovePair]:
    pair = pair_of(base_engine, overlapping)
    yield pair if request.param == "there" else pair.reversed()
    await pair.settle()


class TestMoves(EngineMoveSuite):
    """From it, where a freeze may come when the next step is launched already; to it they are in the journeys."""

    @pytest_asyncio.fixture(loop_scope="session")
    async def pair(self, base_engine: Rig, overlapping: Rig) -> AsyncIterator[MovePair]:
        pair = pair_of(overlapping, base_engine)
        yield pair
        await pair.settle()


class TestJourneys(JourneySuite):
    """To and fro. The overlap scheduler counts tokens for penalties a step later, so that the two engines don't give
    the same with them."""

    penalties = False


@pytest.mark.parametrize("seed", SEEDS)
async def test_penalties_on_a_move_to_itself(overlapping: Rig, seed: int) -> None:
    chance, pair = random.Random(seed), pair_of(overlapping, overlapping)
    for fields in PENALTIES:
        prompt = overlapping.prompt(30)
        expected = await undisturbed(overlapping, prompt, max_new_tokens=TOKENS, **fields)
        moved = await travel(pair, chance, prompt, 3, max_new_tokens=TOKENS, **fields)
        assert moved.moves > 0
        check_equal(moved, expected, f"seed {seed}: {fields}")
    await overlapping.settle()
