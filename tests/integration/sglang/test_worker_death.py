"""When a worker is killed, its ranks die with it."""

import asyncio
import sys
from pathlib import Path

import pytest

from tests.integration.sglang import worker_process
from tests.integration.sglang.conftest import descendants, ended, left_alive

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]


async def test_ranks_die_with_a_killed_worker(random_llama: Path, tmp_path: Path) -> None:
    script = Path(worker_process.__file__)
    worker = await asyncio.create_subprocess_exec(
        sys.executable, script, random_llama, tmp_path, stdout=asyncio.subprocess.PIPE
    )
    assert worker.stdout is not None
    try:
        words = (await worker.stdout.readline()).split()
        assert words[0] == b"ranks", words
        ranks = [int(word) for word in words[1:]]
        assert await worker.stdout.readline() == b"step\n"
        processes = descendants(ranks)
        assert left_alive(processes) == processes
    finally:
        worker.kill()
        await worker.wait()
    await ended(processes)
