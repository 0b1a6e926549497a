"""Two tensor-parallel ranks: the same tokens as one, and an end without remains."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from meshift.backends.sglang.engine import SglangEngine
from tests.contract.engine_kit import Rig
from tests.contract.engine_suite import EngineStopSuite
from tests.integration.sglang.conftest import descendants, left_alive, running
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
