"""Requests move between one rank and two tensor-parallel ones, of which each has its own KV heads."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.contract.engine_kit import MovePair, Rig
from tests.integration.sglang.conftest import CAPACITY_TOKENS, moving, pair_of
from tests.integration.sglang.journeys import JourneySuite

# Soak: sums over two tensor ranks come in another order than one rank's, so the last bits of KV differ between the two
# engines, and whether tokens must be equal then, for any prompt, isn't settled: it failed once, beside other work.
pytestmark = [
    pytest.mark.sglang,
    pytest.mark.soak,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="session"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def split_engine(random_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    folder = tmp_path_factory.mktemp("split")
    async with moving(random_llama, folder, capacity_tokens=CAPACITY_TOKENS, tensor_ranks=2) as rig:
        yield rig


class TestJourneys(JourneySuite):
    """To and fro."""

    @pytest_asyncio.fixture(loop_scope="session", params=["there", "back"])
    async def pair(
        self, request: pytest.FixtureRequest, base_engine: Rig, split_engine: Rig
    ) -> AsyncIterator[MovePair]:
        pair = pair_of(base_engine, split_engine)
        yield pair if request.param == "there" else pair.reversed()
        await pair.settle()
