"""Two pipeline stages, without prefix cache: the same tokens as one, equal decisions on both, requests that move from
and to them, and the death of one."""

import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from meshift.backends.sglang.engine import SglangEngine
from meshift.schemas.errors import Unavailable
from tests.contract.engine_kit import MovePair, Rig
from tests.contract.engine_move_suite import EngineMoveEssentials
from tests.contract.engine_suite import EngineStreamSuite
from tests.integration.sglang.conftest import CAPACITY_TOKENS, descendants, left_alive, moving, pair_of
from tests.integration.sglang.generation import compare
from tests.integration.sglang.journeys import JourneySuite

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="session")]

NOTICE_S_MAX = 1.0
"""Until the listener knows of a dead rank: some milliseconds, more on full cores."""


@contextlib.asynccontextmanager
async def two_stages(model: Path, log_dir: Path, cut: tuple[int, int], page_size: int) -> AsyncIterator[Rig]:
    """An engine of two ranks."""
    tokens = CAPACITY_TOKENS // page_size * page_size
    settings: dict[str, Any] = {"capacity_tokens": tokens, "page_size": page_size, "radix_cache": False}
    async with moving(model, log_dir, pipeline_stages=2, layer_partition=cut, **settings) as rig:
        yield rig


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def staged_engine(random_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    async with two_stages(random_llama, tmp_path_factory.mktemp("pipeline"), (5, 3), 16) as rig:
        yield rig


@pytest_asyncio.fixture(loop_scope="session")
async def staged(staged_engine: Rig) -> AsyncIterator[Rig]:
    """The two stages, left idle and whole by each test."""
    yield staged_engine
    await staged_engine.settle()


class TestStreams(EngineStreamSuite):
    @pytest.fixture
    def rig(self, staged: Rig) -> Rig:
        return staged


async def test_two_stages_give_what_one_gives(base: Rig, staged: Rig) -> None:
    assert (staged.info.pipeline_stages, len(staged.info.rank_pids)) == (2, 2)
    await compare(base, staged)


async def test_stages_agree_while_they_work(staged: Rig) -> None:
    streams = [staged.submit(staged.request(max_new_tokens=60)) for _ in range(staged.concurrency)]
    await staged.produced(streams[0], 5)
    for _ in range(5):
        await staged.engine.check_integrity()
    await staged.finished(*streams)


# ---- moves


@pytest_asyncio.fixture(loop_scope="session", params=["there", "back"])
async def pair(request: pytest.FixtureRequest, base_engine: Rig, staged_engine: Rig) -> AsyncIterator[MovePair]:
    pair = pair_of(base_engine, staged_engine)
    yield pair if request.param == "there" else pair.reversed()
    await pair.settle()


class TestMoves(EngineMoveEssentials):
    """In both directions."""


class TestJourneys(JourneySuite):
    """To and fro, from the faster one on, which also gives what is expected."""

    @pytest_asyncio.fixture(loop_scope="session")
    async def pair(self, base_engine: Rig, staged_engine: Rig) -> AsyncIterator[MovePair]:
        pair = pair_of(base_engine, staged_engine)
        yield pair
        await pair.settle()


@pytest.mark.soak
class TestOtherCuts(JourneySuite):
    """Between two engines of two stages each, which are cut at other layers and have other pages."""

    @pytest_asyncio.fixture(scope="class", loop_scope="session")
    async def other_cut(self, random_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
        async with two_stages(random_llama, tmp_path_factory.mktemp("other-cut"), (2, 6), 1) as rig:
            yield rig

    @pytest_asyncio.fixture(loop_scope="session")
    async def pair(self, staged_engine: Rig, other_cut: Rig) -> AsyncIterator[MovePair]:
        pair = pair_of(staged_engine, other_cut)
        yield pair
        await pair.settle()


# ---- the end


async def test_death_of_a_stage(staged_engine: Rig) -> None:
    """Last: the engine doesn't live on."""
    rig = staged_engine
    assert isinstance(rig.engine, SglangEngine)
    streams = [rig.submit(rig.request(max_new_tokens=rig.long_tokens)) for _ in range(3)]
    await rig.produced(streams[0], 3)
    processes = descendants(rig.info.rank_pids)
    os.kill(rig.info.rank_pids[1], signal.SIGKILL)
    await rig.listener.until(lambda: bool(rig.listener.failures), NOTICE_S_MAX, "on_failure")
    (failure,) = rig.listener.failures
    assert re.search(r"rank 1 .* was killed by SIGKILL", failure.reason)
    assert "max_total_num_tokens=1200" in failure.reason, "no last words of the log"
    calls = rig.listener.calls
    with pytest.raises(Unavailable):
        rig.engine.submit(rig.request())
    rig.engine.cancel(next(iter(rig.listener.streams)))
    assert rig.engine.load().capacity == rig.info.capacity
    await rig.engine.stop(rig.timeout_s)
    assert left_alive(processes) == []
    assert rig.listener.calls == calls
    assert rig.listener.problems == []
