"""Our attention gives, token for token, what SGLang's own does. More models and stackings: `test_all_stackings.py`."""

from pathlib import Path

import pytest

from tests.contract.engine_kit import Rig
from tests.integration.sglang.conftest import running
from tests.integration.sglang.generation import compare, results, submit

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="session")]


def log_of(log_dir: Path) -> str:
    return "".join(path.read_text() for path in log_dir.glob("*.log"))


async def test_chunks_prefixes_and_pages(base: Rig, random_llama: Path, tmp_path: Path) -> None:
    """Small chunks over pages of 16, decode steps mixed into them, prefixes out of the cache."""
    mixed = {"enable_mixed_chunk": True}
    async with running(random_llama, tmp_path, page_size=16, chunked_prefill_size=48, extra_server_args=mixed) as paged:
        await compare(base, paged)
        start = base.prompt(150)
        prompts = [start, start + base.prompt(20), start + base.prompt(1), start[:100] + base.prompt(60)]
        ours = await results(base, *(submit(base, prompt) for prompt in prompts))
        theirs = await results(paged, *(submit(paged, prompt) for prompt in prompts))
        assert [result.tokens for result in ours] == [result.tokens for result in theirs]
        assert any(result.finish.cached_tokens for result in ours)
        await paged.settle()


async def test_without_a_compiler_it_is_sglangs_own(
    base: Rig, random_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so, and gives the same."""
    (tmp_path / "compiler").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "compiler").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "compiler"))
    monkeypatch.setenv("MESHIFT_CACHE", str(tmp_path / "cache"))
    async with running(random_llama, tmp_path) as native:
        await compare(base, native)
        assert "attention falls back to SGLang's torch_native" in log_of(tmp_path)
        await native.settle()
