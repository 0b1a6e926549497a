"""`meshift up` with simulated engines: the processes, their supervision, and the commands that find them."""

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import httpx
import pytest

from meshift.services.cli.model import SMALL_MODEL
from meshift.services.cli.paths import models_folder
from meshift.services.cli.state import ClusterState, read_state
from meshift.services.cli.up import until_serving
from tests.support.processes import run_meshift, watched

pytestmark = [pytest.mark.nats, pytest.mark.slow, pytest.mark.timeout(180)]

MESHIFT = (sys.executable, "-P", "-m", "meshift.services.cli")
DEADLINE_S = 60.0
"""Four interpreters start at once on a machine that may have two busy cores."""

SIM_SPEED = "20"


class RunningUp:
    """A `meshift up` and what it has printed."""

    def __init__(self, process: asyncio.subprocess.Process, state_dir: Path) -> None:
        self.process = process
        self.state_dir = state_dir
        self.lines: list[str] = []

    async def until_line(self, pattern: str) -> str:
        """The first line from now on that matches."""
        assert self.process.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            while line := (await self.process.stdout.readline()).decode().rstrip("\n"):
                self.lines.append(line)
                if re.search(pattern, line):
                    return line
        raise AssertionError(f"no line {pattern!r} in:\n" + "\n".join(self.lines))

    async def until_end(self) -> int:
        """Its exit status, after all that it says."""
        assert self.process.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            rest = await self.process.stdout.read()
            self.lines += rest.decode().splitlines()
            return await self.process.wait()

    def state(self) -> ClusterState:
        """What it wrote for the other commands."""
        state = read_state(self.state_dir)
        assert state is not None
        return state


def environment(state_dir: Path) -> dict[str, str]:
    """No setting of the machine that runs the test, but where the models are."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MESHIFT_")}
    ours = {"MESHIFT_STATE_DIR": str(state_dir), "MESHIFT_MODELS": str(models_folder()), "MESHIFT_SIM_SPEED": SIM_SPEED}
    return {**kept, **ours}


@contextlib.asynccontextmanager
async def running_up(
    state_dir: Path, *arguments: str, settings: Mapping[str, str] | None = None
) -> AsyncIterator[RunningUp]:
    """`meshift up` with a free port; killed at the end if it still runs."""
    if not (models_folder() / SMALL_MODEL / "config.json").exists():
        pytest.skip("the small model isn't prepared: `meshift model prepare`")
    process = await asyncio.create_subprocess_exec(
        *MESHIFT, "up", "--engine", "sim", "--port", "0", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env={**environment(state_dir), **(settings or {})},
    )  # fmt: skip
    try:
        yield RunningUp(process, state_dir)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def meshift(state_dir: Path, *arguments: str) -> tuple[int, str]:
    """Run another command; its exit status and output."""
    return await run_meshift(*arguments, deadline_s=DEADLINE_S, environment=environment(state_dir))


async def test_a_mesh_from_start_to_end(tmp_path: Path) -> None:
    async with running_up(tmp_path, "--workers", "2") as up:
        ready = await up.until_line(r"^ready ")
        url = up.state().url
        assert ready == f"ready {url}"
        await up.until_line(r"^  curl http://")
        await check_chat(tmp_path, url)
        await check_status_and_drain(tmp_path, up)
        await check_restart(tmp_path, up)
        await check_a_second_one_is_refused(tmp_path, url)
        await check_end(up)
    assert [line for line in up.lines if line.startswith("ready ")] == [ready]


async def check_chat(state_dir: Path, url: str) -> None:
    status, text = await meshift(state_dir, "chat", "What is the capital of France?", "--max-tokens", "12")
    assert status == 0, text
    assert text.strip()
    body = {"model": "smollm2", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    async with httpx.AsyncClient(timeout=DEADLINE_S) as client:
        answer = (await client.post(f"{url}/v1/chat/completions", json=body)).json()
    assert answer["usage"]["completion_tokens"] == 4
    status, text = await meshift(state_dir, "chat", "hello", "--model", "other")
    assert status == 1
    assert "other" in text


async def check_status_and_drain(state_dir: Path, up: RunningUp) -> None:
    status, text = await meshift(state_dir, "status")
    assert status == 0, text
    table, *metrics = text.strip().split("\nmetrics of ")
    assert metrics == [f"frontend: {up.state().url}/metrics"]
    header, *rows = [line.split() for line in table.splitlines()]
    assert header[0] == "INSTANCE"
    assert [row[0] for row in rows] == ["worker-1", "worker-2"]
    assert {row[2] for row in rows} == {"ready"}
    assert (await meshift(state_dir, "drain", "worker-9"))[0] == 1
    status, text = await meshift(state_dir, "drain", "worker-2")
    assert status == 0, text
    await up.until_line("worker-2: left")
    status, text = await meshift(state_dir, "status")
    assert [line.split()[0] for line in text.splitlines()[1:] if not line.startswith("metrics")] == ["worker-1"]


async def check_restart(state_dir: Path, up: RunningUp) -> None:
    first = up.state().pids["worker-1"]
    os.kill(first, signal.SIGKILL)
    await up.until_line(r"worker-1: died \(killed by SIGKILL\); starting it again in 0\.5 s")
    await up.until_line("worker-1: ready")
    assert up.state().pids["worker-1"] != first
    # The frontend has to hear of the new incarnation before it can serve.
    await until_serving(up.state().url)
    status, text = await meshift(state_dir, "chat", "still there?", "--max-tokens", "3")
    assert status == 0, text


async def check_a_second_one_is_refused(state_dir: Path, url: str) -> None:
    status, text = await meshift(state_dir, "up", "--engine", "sim", "--port", "0")
    assert status == 1
    assert f"already at {url}" in text
    port = url.rpartition(":")[2]
    status, text = await meshift(
        state_dir, "up", "--engine", "sim", "--port", port, "--state-dir", str(state_dir / "b")
    )
    assert status == 1
    assert f"can't listen on 127.0.0.1:{port}: Address already in use" in text


async def check_end(up: RunningUp) -> None:
    with contextlib.ExitStack() as stack:
        gone = [stack.enter_context(watched(pid)) for pid in up.state().pids.values()]
        up.process.send_signal(signal.SIGINT)
        assert await up.until_end() == 0
        assert all(event.is_set() for event in gone)
    assert up.lines[-1].endswith("stopped")
    assert not (up.state_dir / "cluster.json").exists()


async def test_a_killed_mesh_leaves_no_process(tmp_path: Path) -> None:
    async with running_up(tmp_path) as up:
        await up.until_line(r"^ready ")
        pids = list(up.state().pids.values())
        assert len(pids) == 4
        with contextlib.ExitStack() as stack:
            gone = [stack.enter_context(watched(pid)) for pid in pids]
            up.process.kill()
            async with asyncio.timeout(DEADLINE_S):
                await asyncio.gather(*(event.wait() for event in gone))
    status, text = await meshift(tmp_path, "status", "--nats", "nats://127.0.0.1:1")
    assert status == 1
    assert "no mesh answers at nats://127.0.0.1:1" in text


async def test_a_service_that_does_not_start_is_explained(tmp_path: Path) -> None:
    """The whole ends with the end of that service's log."""
    async with running_up(tmp_path, settings={"MESHIFT_SIM_SPEED": "0"}) as up:
        assert await up.until_end() == 1
    said = "\n".join(up.lines)
    assert "worker-1 failed; the end of" in said
    assert "--sim-speed (MESHIFT_SIM_SPEED): Input should be greater than 0" in said
    assert not any(line.startswith("ready ") for line in up.lines)


async def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    async with running_up(tmp_path, "--drain-deadline-s", "600", settings={"MESHIFT_SIM_SPEED": "0.01"}) as up:
        await up.until_line(r"^ready ")
        body = {"model": "smollm2", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1000}
        async with httpx.AsyncClient(timeout=DEADLINE_S) as client:
            asking = asyncio.create_task(client.post(f"{up.state().url}/v1/chat/completions", json=body))
            await until_running(up)
            up.process.send_signal(signal.SIGTERM)
            await up.until_line("frontend: stopping")
            up.process.send_signal(signal.SIGTERM)
            assert await up.until_end() == 0
            with pytest.raises(httpx.HTTPError):
                await asking
    assert any("ending at once" in line for line in up.lines)


async def until_running(up: RunningUp) -> None:
    """Until some instance has a request in its batch."""
    async with asyncio.timeout(DEADLINE_S):
        while "  1     0  " not in (await meshift(up.state_dir, "status"))[1]:
            pass


async def test_a_mesh_grows_and_shrinks_by_itself(tmp_path: Path) -> None:
    """Streams that a small instance can't hold at once: a second one is launched, takes some of them, and is released
    again at zero traffic. No stream is lost or altered on the way."""
    settings = {
        "MESHIFT_CAPACITY_TOKENS": "1024",
        "MESHIFT_SIM_SPEED": "4",
        "MESHIFT_SCHEDULING__SCALING__CALM_S": "1",
        "MESHIFT_SCHEDULING__SCALING__SUSTAIN_S": "1",
        "MESHIFT_SCALING_INTERVAL_S": "0.2",
    }
    bounds = ("--autoscale", "--workers-min", "1", "--workers-max", "2")
    async with running_up(tmp_path, *bounds, settings=settings) as up:
        await up.until_line(r"^ready ")
        url = up.state().url
        alone = await one_stream(url)
        streams = [asyncio.create_task(one_stream(url)) for _ in range(12)]
        await up.until_line(r"worker-2: launched for scheduler")
        await up.until_line(r"worker-2: ready")
        texts = await asyncio.gather(*streams)
        assert set(texts) == {alone}
        released = await up.until_line(r"worker-[12]: released$")
        left = "worker-1" if "worker-2" in released else "worker-2"
        status, text = await meshift(tmp_path, "status")
        assert status == 0, text
        assert [line.split()[0] for line in text.splitlines()[1:] if line.startswith("worker")] == [left]
        status, text = await meshift(tmp_path, "decisions", "--subject", "scaling")
        assert status == 0, text
        assert "scaling -> start" in text
        assert "scaling -> drain" in text
        status, text = await meshift(tmp_path, "policy", "set", "scaling.instances_min=2")
        assert status == 0, text
        await up.until_line(rf"worker-{3 - int(left[-1])}: ready")
        assert await one_stream(url) == alone
        up.process.send_signal(signal.SIGINT)
        assert await up.until_end() == 0


async def one_stream(url: str) -> str:
    """An answer of 300 tokens, the same each time."""
    message = {"role": "user", "content": "Tell me a story. " * 20}
    body = {
        "model": "smollm2", "messages": [message], "max_tokens": 300, "temperature": 0, "seed": 1, "ignore_eos": True,
    }  # fmt: skip
    async with httpx.AsyncClient(timeout=DEADLINE_S) as client:
        answer = (await client.post(f"{url}/v1/chat/completions", json=body)).json()
    assert answer["usage"]["completion_tokens"] == 300, answer
    return str(answer["choices"][0]["message"]["content"])
