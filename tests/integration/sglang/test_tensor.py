"""Two tensor-parallel ranks: the same tokens as one, and an end without remains."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.contract.engine_kit import Rig
from tests.contract.engine_suite import EngineStopSuite
from tests.integration.sglang.conftest import descendants, ended, left_alive, running
from tests.integration.sglang.generation import compare

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="session")]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def split_engine(random_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    async with running(random_llama, tmp_path_factory.mktemp("tensor"), tensor_ranks=2) as rig:
        yield rig


async def test_two_tensor_ranks_give_what_one_gives(base: Rig, split_engine: Rig) -> None:
    assert (split_engine.info.tensor_ranks, len(split_engine.info.rank_pids)) == (2, 2)
    await compare(base, split_engine)
    await split_engine.settle()


def remains() -> set[str]:
    """What ranks could leave in the file system."""
    return {str(path) for pattern in ("/dev/shm/*", "/tmp/meshift-*") for path in Path("/").glob(pattern[1:])}


class TestStop(EngineStopSuite):
    """Last: the engine doesn't live on."""

    @pytest_asyncio.fixture(loop_scope="session")
    async def rig(self, split_engine: Rig) -> AsyncIterator[Rig]:
        processes = descendants(split_engine.info.rank_pids)
        before = remains()
        yield split_engine
        assert left_alive(split_engine.info.rank_pids) == []
        await ended(processes)
        assert len(remains() - before) == 0
