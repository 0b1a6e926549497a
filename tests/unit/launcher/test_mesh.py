"""A mesh of dummy services, and what decides about it."""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from meshift.schemas.errors import Unavailable
from meshift.services.launcher import ChildState, ChildStatus, LauncherError, LaunchSpec, LocalLauncher
from meshift.services.launcher.base import EventHandler
from meshift.services.launcher.mesh import LocalMesh, MeshPlan, keep_alive, stop_order, why_over
from meshift.services.launcher.restart import Decision, Ended, GiveUp, Restart

DEADLINE_S = 10.0
SERVES = "echo dummy is ready; exec sleep 600"


@pytest.fixture
def plan(tmp_path: Path) -> MeshPlan:
    return MeshPlan(
        nats_url="nats://127.0.0.1:1",
        workers=2,
        worker_settings={"engine": "sim"},
        host="127.0.0.1",
        port=8000,
        log_dir=tmp_path,
        drain_deadline_s=2.5,
    )


def test_specs(plan: MeshPlan) -> None:
    specs = plan.specs()
    assert list(specs) == ["scheduler", "coordinator", "frontend", "worker-1", "worker-2"]
    assert {spec.settings["nats"] for spec in specs.values()} == {plan.nats_url}
    assert specs["frontend"].settings["grace_s"] == 3
    assert specs["worker-2"].settings["instance_id"] == "worker-2"
    assert specs["worker-2"].settings["engine"] == "sim"


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:8000"), ("0.0.0.0", "http://127.0.0.1:8000"), ("::1", "http://[::1]:8000")],
)
def test_url(plan: MeshPlan, host: str, url: str) -> None:
    assert replace(plan, host=host).url == url


def test_the_frontend_stops_before_the_workers() -> None:
    order = stop_order(["scheduler", "coordinator", "frontend", "worker-1", "worker-2"])
    assert order == [["frontend"], ["worker-1", "worker-2"], ["scheduler", "coordinator"]]
    assert stop_order(["scheduler"]) == [[], [], ["scheduler"]]


@pytest.mark.parametrize(
    ("ended", "reason"),
    [
        ((), ""),
        (("worker-1",), ""),
        (("scheduler",), ""),
        (("worker-1", "worker-2"), "no worker is left"),
        (("frontend",), "the frontend is gone"),
    ],
)
def test_when_a_mesh_is_over(ended: tuple[str, ...], reason: str) -> None:
    names = ("scheduler", "frontend", "worker-1", "worker-2")
    states = {name: ChildState.FAILED if name in ended else ChildState.BACKOFF for name in names}
    assert why_over([ChildStatus(name, state, None, 0, Path("log")) for name, state in states.items()]) == reason


class DummyMesh:
    """A mesh whose services are shell scripts."""

    def __init__(self, plan: MeshPlan) -> None:
        self.plan = plan
        self.scripts: dict[str, str] = {}
        self.lines: list[str] = []
        self.statuses: list[ChildStatus] = []
        self.mesh = LocalMesh(plan, self.lines.append, self._on_change, self._make_launcher)

    def _on_change(self, statuses: list[ChildStatus]) -> None:
        self.statuses = statuses

    def _make_launcher(self, log_dir: Path, on_event: EventHandler) -> LocalLauncher:
        return LocalLauncher(log_dir, on_event, self._command_of)

    def _command_of(self, spec: LaunchSpec) -> list[str]:
        name = str(spec.settings.get("instance_id", spec.service))
        return ["/bin/sh", "-c", self.scripts.get(name, SERVES)]


@pytest.fixture
async def dummy(plan: MeshPlan) -> AsyncIterator[DummyMesh]:
    dummy = DummyMesh(plan)
    yield dummy
    dummy.mesh.kill()
    async with asyncio.timeout(DEADLINE_S):
        await dummy.mesh.stop()


async def test_start_and_stop(dummy: DummyMesh) -> None:
    async with asyncio.timeout(DEADLINE_S):
        await dummy.mesh.start()
        assert {status.state for status in dummy.statuses} == {ChildState.READY}
        await dummy.mesh.stop()
    assert {status.state for status in dummy.statuses} == {ChildState.STOPPED}
    stopped = [line for line in dummy.lines if line.endswith(": stopped")]
    assert stopped[0] == "frontend: stopped"
    assert set(stopped[-2:]) == {"scheduler: stopped", "coordinator: stopped"}


async def test_a_service_that_does_not_start_ends_the_start(dummy: DummyMesh) -> None:
    dummy.scripts["worker-2"] = "echo out of memory >&2; exit 1"
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(LauncherError, match="worker-2 failed") as raised:
            await dummy.mesh.start()
    assert "out of memory" in str(raised.value)


async def test_a_mesh_is_over_when_its_last_worker_left(dummy: DummyMesh) -> None:
    """Two drains by hand."""
    for name in dummy.plan.worker_ids:
        dummy.scripts[name] = "trap 'exit 0' USR1; echo dummy is ready; while :; do sleep 0.01; done"
    async with asyncio.timeout(DEADLINE_S):
        await dummy.mesh.start()
        over = asyncio.create_task(dummy.mesh.until_over())
        for status in dummy.statuses:
            if status.instance_id in dummy.plan.worker_ids and status.pid is not None:
                os.kill(status.pid, 10)
        assert await over == "no worker is left"


class FlakyServer:
    """A NATS server that dies as often as it is told to."""

    url = "nats://127.0.0.1:1"

    def __init__(self, deaths: int, failed_starts: int = 0) -> None:
        self.deaths = deaths
        self.failed_starts = failed_starts
        self.starts = 0

    async def start(self) -> str:
        self.starts += 1
        if self.failed_starts:
            self.failed_starts -= 1
            raise Unavailable("address in use")
        return self.url

    async def wait(self) -> int:
        if self.deaths == 0:
            await asyncio.get_running_loop().create_future()
        self.deaths -= 1
        return 0

    async def stop(self) -> None:
        self.deaths = 0


def twice(ended: Ended) -> Decision:
    assert ended.exit_status != 0
    return Restart(0.0, ended.failures + 1) if ended.failures < 2 else GiveUp("enough")


async def test_nats_is_started_again() -> None:
    server, lines = FlakyServer(deaths=2), list[str]()
    task = asyncio.create_task(keep_alive(server, lines.append, twice))
    for _ in range(20):
        await asyncio.sleep(0)
    assert server.starts == 2
    assert [line for line in lines if line == "nats: started again"] == ["nats: started again"] * 2
    task.cancel()


@pytest.mark.parametrize("failed_starts", [0, 2])
async def test_nats_that_dies_again_and_again(failed_starts: int) -> None:
    server, lines = FlakyServer(deaths=10, failed_starts=failed_starts), list[str]()
    with pytest.raises(LauncherError, match="again and again"):
        await keep_alive(server, lines.append, twice)
    assert server.starts == 2
    assert lines.count("nats: address in use") == failed_starts
    assert all(first != second for first, second in itertools.pairwise(lines))
