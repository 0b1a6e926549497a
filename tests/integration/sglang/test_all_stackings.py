"""Every stacking gives, token for token, what SGLang's own attention gives over one slab a layer: on a real model, and
on a random one of odd sizes. `test_stock.py` has the same of single layers, in milliseconds."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from meshift.backends.sglang.models import make_random_llama
from tests.contract.engine_kit import Rig
from tests.contract.engine_resize_suite import resize
from tests.integration.sglang.conftest import running
from tests.integration.sglang.generation import compare, generate, results, submit

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.soak,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="session"),
]

ODD_PAGE = 64
"""Whole units for each stacking of its five heads of 24."""


@pytest.fixture(scope="session")
def odd_llama(smollm2: Path) -> Path:
    """Seven layers, three query heads on each of five KV heads, of 24 elements."""
    return make_random_llama(
        smollm2.parent / "random-llama-odd",
        tokenizer_from=smollm2,
        head_scale=0.15,
        layers=7,
        hidden=360,
        heads=15,
        kv_heads=5,
    )


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def odd_native(odd_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    async with running(odd_llama, tmp_path_factory.mktemp("odd"), attention_backend="torch_native") as rig:
        yield rig


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def smollm2_native(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    settings = {"attention_backend": "torch_native", "threads_per_rank": 2}
    async with running(smollm2, tmp_path_factory.mktemp("smollm2"), **settings) as rig:
        yield rig


@pytest.mark.parametrize("k", [1, 2, 4, 8])
async def test_odd_sizes(k: int, odd_native: Rig, odd_llama: Path, tmp_path: Path) -> None:
    settings = {"layers_per_group": k, "page_size": ODD_PAGE, "chunked_prefill_size": 128, "capacity_tokens": 1920}
    async with running(odd_llama, tmp_path, **settings) as rig:
        await compare(odd_native, rig)
        await rig.settle()


@pytest.mark.parametrize("k", [None, 1, 2, 4, 8])
async def test_smollm2(k: int | None, smollm2_native: Rig, smollm2: Path, tmp_path: Path) -> None:
    prompts = [smollm2_native.prompt(size) for size in (700, 30, 5)]
    expected = await results(smollm2_native, *(submit(smollm2_native, prompt) for prompt in prompts))
    async with running(smollm2, tmp_path, layers_per_group=k, threads_per_rank=2) as rig:
        found = await results(rig, *(submit(rig, prompt) for prompt in prompts))
        assert [result.tokens for result in found] == [result.tokens for result in expected]
        await rig.settle()


@pytest.mark.parametrize("k", [1, 2, 8])
async def test_chunks_and_cached_prefixes(k: int, base: Rig, random_llama: Path, tmp_path: Path) -> None:
    async with running(random_llama, tmp_path, layers_per_group=k, chunked_prefill_size=64) as rig:
        await compare(base, rig)
        shared = base.prompt(100)
        prompts = [shared + base.prompt(size) for size in (1, 20, 40)]
        expected = [await generate(base, prompt) for prompt in prompts]
        again = [await generate(rig, prompt) for prompt in prompts]
        assert [result.tokens for result in again] == [result.tokens for result in expected]
        assert again[-1].finish.cached_tokens >= 96
        await rig.settle()


async def test_two_tensor_ranks(base: Rig, random_llama: Path, tmp_path: Path) -> None:
    async with running(random_llama, tmp_path, layers_per_group=4, tensor_ranks=2) as rig:
        await compare(base, rig)
        assert (await resize(rig, 800)).capacity == 800
        await rig.settle()
