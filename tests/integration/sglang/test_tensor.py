"""Two tensor-parallel ranks, of which each has its own KV heads: the same tokens as one, requests that move from and to
them, and an end without remains."""

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from meshift.backends.sglang.engine import SglangEngine
from tests.contract.engine_kit import MovePair, Rig
from tests.contract.engine_suite import EngineStopSuite
from tests.integration.sglang.conftest import CAPACITY_TOKENS, SEED, descendants, left_alive, moving, pair_of
from tests.integration.sglang.generation import PENALTIES, TOKENS, compare
from tests.integration.sglang.journeys import JourneySuite
from tests.integration.sglang.moving import check_equal, travel, undisturbed

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="session")]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def split_engine(random_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    folder = tmp_path_factory.mktemp("tensor")
    async with moving(random_llama, folder, capacity_tokens=CAPACITY_TOKENS, tensor_ranks=2) as rig:
        yield rig


async def test_two_tensor_ranks_give_what_one_gives(base: Rig, split_engine: Rig) -> None:
    assert (split_engine.info.tensor_ranks, len(split_engine.info.rank_pids)) == (2, 2)
    await compare(base, split_engine)
    await split_engine.settle()


@pytest_asyncio.fixture(loop_scope="session")
async def pair(base_engine: Rig, split_engine: Rig) -> AsyncIterator[MovePair]:
    pair = pair_of(base_engine, split_engine)
    yield pair
    await pair.settle()


async def test_journeys(pair: MovePair) -> None:
    """Sums over two ranks come in another order than one's: near ties may come out otherwise."""
    chance = random.Random(SEED)
    kinds: list[dict[str, Any]] = [{"logprobs": 3}, {"logprobs": 2, "temperature": 1.0, "seed": 8}, PENALTIES[3]]
    prompts = [pair.source.prompt(30) for _ in kinds]
    journeys = [
        await travel(pair, chance, prompt, 2, max_new_tokens=TOKENS, **kind)
        for prompt, kind in zip(prompts, kinds, strict=True)
    ]
    for kind, prompt, journey in zip(kinds, prompts, journeys, strict=True):
        assert journey.moves == 2
        expected = await undisturbed(pair.source, prompt, max_new_tokens=TOKENS, **kind)
        check_equal(journey, expected, prompt, kind, **kind)


@pytest.mark.soak
class TestJourneys(JourneySuite):
    """To and fro, under load."""


def traces(rig: Rig) -> list[Path]:
    """What the engine has in the file system: its sockets' folder, and its ranks' shared memory."""
    assert isinstance(rig.engine, SglangEngine)
    assert rig.engine._instance._link is not None
    mapped = [line.split() for pid in rig.info.rank_pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    shared = {Path(words[5]) for words in mapped if len(words) == 6 and words[5].startswith("/dev/shm/")}
    return [rig.engine._instance._link.folder, *shared]


class TestStop(EngineStopSuite):
    """Last: the engine doesn't live on."""

    @pytest_asyncio.fixture(loop_scope="session")
    async def rig(self, split_engine: Rig) -> AsyncIterator[Rig]:
        processes, files = descendants(split_engine.info.rank_pids), traces(split_engine)
        assert all(path.exists() for path in files)
        yield split_engine
        assert left_alive(processes) == []
        assert [path for path in files if path.exists()] == []
