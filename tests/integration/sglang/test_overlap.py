"""The overlap scheduler, with KV in units of four layers and pages of 16 tokens: exact too, though its penalties lag by
a token, and requests move from and to it."""

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.contract.engine_kit import MovePair, Rig
from tests.contract.engine_move_suite import EngineMoveSuite
from tests.contract.engine_resize_suite import EngineResizeSuite, resize
from tests.contract.engine_suite import EngineStreamSuite
from tests.integration.sglang.conftest import CAPACITY_TOKENS, moving, pair_of
from tests.integration.sglang.generation import KINDS, PENALTIES, check_resumes, generate, results, submit
from tests.integration.sglang.journeys import TOKENS, JourneySuite
from tests.integration.sglang.moving import check_equal, travel, undisturbed

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="session")]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def overlapped_engine(random_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    folder = tmp_path_factory.mktemp("overlap")
    async with moving(random_llama, folder, capacity_tokens=CAPACITY_TOKENS, overlap=True, layers_per_group=4) as rig:
        assert rig.info.page_size == 16
        yield rig


@pytest_asyncio.fixture(loop_scope="session")
async def overlapped(overlapped_engine: Rig) -> AsyncIterator[Rig]:
    """Left idle, whole, and of its first capacity by each test."""
    yield overlapped_engine
    if overlapped_engine.engine.load().capacity != overlapped_engine.info.capacity:
        await resize(overlapped_engine, overlapped_engine.info.capacity)
    await overlapped_engine.settle()


# ---- what it gives


class TestStreams(EngineStreamSuite):
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
    await check_resumes(overlapped, overlapped.prompt(), cuts=(1, 21), **fields)


async def test_what_needs_no_history_is_as_without_overlap(base: Rig, overlapped: Rig) -> None:
    prompt = base.prompt()
    assert (await generate(base, prompt)).tokens == (await generate(overlapped, prompt)).tokens


async def test_the_longest_request_runs(overlapped: Rig) -> None:
    longest = overlapped.info.model.context_tokens_max
    streams = [submit(overlapped, overlapped.prompt(longest - 3), max_new_tokens=3) for _ in range(2)]
    assert [len(result.tokens) for result in await results(overlapped, *streams)] == [3, 3]


# ---- moves


@pytest_asyncio.fixture(loop_scope="session")
async def pair(base_engine: Rig, overlapped_engine: Rig) -> AsyncIterator[MovePair]:
    """From it: a freeze may come when the next step is launched already."""
    pair = pair_of(overlapped_engine, base_engine)
    yield pair
    await pair.settle()


class TestMoves(EngineMoveSuite):
    """From it, all of it."""

    @pytest.mark.parametrize("phase", ["copies", "freeze"])
    async def test_resume_with_a_new_attempt(self, pair: MovePair, phase: str) -> None:
        await super().test_resume_with_a_new_attempt(pair, phase)

    @pytest.mark.parametrize("phase", ["reserve", "copies", "freeze"])
    async def test_cancelled_while_moving(self, pair: MovePair, phase: str) -> None:
        await super().test_cancelled_while_moving(pair, phase)

    @pytest.mark.parametrize("phase", ["freeze"])
    async def test_a_waiting_request_is_cancelled(self, pair: MovePair, phase: str) -> None:
        await super().test_a_waiting_request_is_cancelled(pair, phase)


class TestJourneys(JourneySuite):
    """To and fro. It counts tokens for penalties a step later: the two engines don't give the same with them."""

    penalties = False


async def test_penalties_on_a_move_to_itself(overlapped_engine: Rig) -> None:
    chance, pair = random.Random(1), pair_of(overlapped_engine, overlapped_engine)
    for fields in PENALTIES:
        prompt = overlapped_engine.prompt(30)
        expected = await undisturbed(overlapped_engine, prompt, max_new_tokens=TOKENS, **fields)
        moved = await travel(pair, chance, prompt, 3, max_new_tokens=TOKENS, **fields)
        assert moved.moves > 0
        check_equal(moved, expected, prompt, fields, **fields)
    await overlapped_engine.settle()
