"""Requests move live between real engines: the suite of all movable engines, on engines as different as they may be."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.contract.engine_kit import MovePair, Rig
from tests.contract.engine_move_suite import EngineMoveSuite
from tests.integration.sglang.conftest import running

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="session")]

CAPACITY_TOKENS = 2048
RESERVATION_S = 60.0
SHORT_RESERVATION_S = 0.3
HEADROOM_TOKENS = 100
"""The small model makes some hundred tokens a second."""


@contextlib.asynccontextmanager
async def movable_engine(model: Path, folder: pytest.TempPathFactory, name: str, **settings: Any) -> AsyncIterator[Rig]:
    """One that compares what it moves at both ends."""
    # Admits more than fits, so that requests are preempted.
    greedy = {"schedule_conservativeness": 0.1}
    fixed: dict[str, Any] = {"capacity_tokens": CAPACITY_TOKENS, "verify_moves": True, "extra_server_args": greedy}
    async with running(model, folder.mktemp(name), **fixed, instance_name=name, **settings) as rig:
        rig.filler_prompts = (900, 900)
        rig.waiter_tokens = 500
        yield rig


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def overlapping(random_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    async with movable_engine(random_llama, tmp_path_factory, "overlapping", overlap=True) as rig:
        yield rig


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def paged(random_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    settings: dict[str, Any] = {"page_size": 16, "radix_cache": False}
    async with movable_engine(random_llama, tmp_path_factory, "paged", **settings) as rig:
        yield rig


class TestMoves(EngineMoveSuite):
    @pytest_asyncio.fixture(loop_scope="session", params=["out", "back"])
    async def pair(self, request: pytest.FixtureRequest, overlapping: Rig, paged: Rig) -> AsyncIterator[MovePair]:
        pair = MovePair(overlapping, paged, RESERVATION_S, SHORT_RESERVATION_S, HEADROOM_TOKENS)
        yield pair if request.param == "out" else pair.reversed()
        await pair.settle()
