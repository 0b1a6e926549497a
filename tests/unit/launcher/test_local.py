"""LocalLauncher, with shell scripts in the services' place."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from meshift.services.launcher import ChildEvent, ChildState, ChildStatus, LauncherError, LaunchSpec, LocalLauncher
from meshift.services.launcher.local import meshift_command
from meshift.services.launcher.restart import Decision, Ended, GiveUp, Leave, Restart
from tests.support.processes import watched

DEADLINE_S = 10.0

SERVES = "echo dummy is ready; exec sleep 600"
STUBBORN = "trap '' TERM; echo dummy is ready; while :; do sleep 600; done"


def at_once(ended: Ended) -> Decision:
    """The policy's answers without its delays."""
    if ended.exit_status == 0:
        return Leave()
    return Restart(0.0, ended.failures + 1) if ended.ever_ready else GiveUp("it did not start")


def shell(spec: LaunchSpec) -> list[str]:
    return ["/bin/sh", "-c", str(spec.settings["script"])]


def spec(script: str) -> LaunchSpec:
    return LaunchSpec("dummy", {"script": script})


class Fixture:
    """A launcher and what it said."""

    def __init__(self, log_dir: Path) -> None:
        self.events: list[ChildEvent] = []
        self.changed = asyncio.Event()
        self.launcher = LocalLauncher(log_dir, self._on_event, shell, at_once)

    def _on_event(self, event: ChildEvent) -> None:
        self.events.append(event)
        self.changed.set()

    def status(self, instance_id: str = "dummy") -> ChildStatus:
        return next(status for status in self.launcher.list() if status.instance_id == instance_id)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def ready(self, script: str = SERVES) -> int:
        """Launch `script`; returns its pid when it is ready."""
        await self.launcher.launch("dummy", spec(script))
        async with asyncio.timeout(DEADLINE_S):
            await self.launcher.wait_ready("dummy")
        pid = self.status().pid
        assert pid is not None
        return pid


@pytest.fixture
async def fixture(tmp_path: Path) -> AsyncIterator[Fixture]:
    fixture = Fixture(tmp_path / "logs")
    yield fixture
    fixture.launcher.kill()
    async with asyncio.timeout(DEADLINE_S):
        for status in fixture.launcher.list():
            await fixture.launcher.stop(status.instance_id, 0.0)


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_launch_and_stop(fixture: Fixture) -> None:
    pid = await fixture.ready()
    assert fixture.status().state is ChildState.READY
    assert fixture.status().log.read_text() == "dummy is ready\n"
    await fixture.launcher.stop("dummy", DEADLINE_S)
    assert fixture.status().state is ChildState.STOPPED
    assert fixture.status().pid is None
    assert is_gone(pid)
    assert [event.status.state for event in fixture.events] == ["ready", "stopping", "stopped"]
    await fixture.launcher.stop("dummy", DEADLINE_S)


async def test_a_killed_child_is_started_again(fixture: Fixture) -> None:
    pid = await fixture.ready()
    os.kill(pid, 9)
    await fixture.until(lambda: fixture.status().restarts == 1 and fixture.status().state is ChildState.READY)
    assert fixture.status().pid not in (None, pid)
    assert "died (killed by SIGKILL); starting it again in 0.0 s" in [event.text for event in fixture.events]
    assert fixture.status().log.read_text() == "dummy is ready\n---- started again ----\ndummy is ready\n"


async def test_a_child_that_leaves_is_let_go(fixture: Fixture) -> None:
    await fixture.launcher.launch("dummy", spec("echo dummy is ready; exit 0"))
    await fixture.until(lambda: fixture.status().state is ChildState.STOPPED)
    assert fixture.status().restarts == 0


async def test_one_that_does_not_start_fails_with_the_end_of_its_log(fixture: Fixture) -> None:
    await fixture.launcher.launch("dummy", spec("echo no such model >&2; exit 3"))
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(LauncherError, match=r"dummy failed.*\nno such model"):
            await fixture.launcher.wait_ready("dummy")
    assert fixture.events[-1].text == "died (exit status 3); it did not start"


async def test_a_command_that_does_not_exist(fixture: Fixture, tmp_path: Path) -> None:
    launcher = LocalLauncher(tmp_path, command_of=lambda _: [str(tmp_path / "nothing")])
    with pytest.raises(LauncherError, match="can't be started"):
        await launcher.launch("dummy", spec(""))
    assert launcher.list()[0].state is ChildState.FAILED


async def test_a_restart_that_can_not_be_made_fails(fixture: Fixture, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\n{SERVES}\n")
    program.chmod(0o755)
    launcher = LocalLauncher(tmp_path, command_of=lambda _: [str(program)], policy=at_once)
    await launcher.launch("dummy", spec(""))
    async with asyncio.timeout(DEADLINE_S):
        await launcher.wait_ready("dummy")
        program.unlink()
        pid = launcher.list()[0].pid
        assert pid is not None
        os.kill(pid, 9)
        await launcher.stop("dummy", DEADLINE_S)
    assert launcher.list()[0].state in (ChildState.FAILED, ChildState.STOPPED)
    assert launcher.list()[0].pid is None


async def test_a_stubborn_child_is_killed_at_the_deadline(fixture: Fixture) -> None:
    pid = await fixture.ready(STUBBORN)
    await fixture.launcher.stop("dummy", 0.05)
    assert fixture.status().state is ChildState.STOPPED
    assert is_gone(pid)


async def test_stop_leaves_no_grandchild(fixture: Fixture, tmp_path: Path) -> None:
    pid_file = tmp_path / "grandchild"
    await fixture.ready(f"sleep 600 & echo $! > {pid_file}; echo dummy is ready; wait")
    grandchild = int(pid_file.read_text())
    with watched(grandchild) as gone:
        assert not gone.is_set()
        await fixture.launcher.stop("dummy", DEADLINE_S)
        async with asyncio.timeout(DEADLINE_S):
            await gone.wait()


async def test_stop_while_it_waits_for_its_restart(tmp_path: Path) -> None:
    fixture = Fixture(tmp_path)
    fixture.launcher = LocalLauncher(tmp_path, fixture._on_event, shell, lambda _: Restart(3600.0, 1))
    pid = await fixture.ready()
    os.kill(pid, 9)
    await fixture.until(lambda: fixture.status().state is ChildState.BACKOFF)
    async with asyncio.timeout(DEADLINE_S):
        await fixture.launcher.stop("dummy", DEADLINE_S)
    assert fixture.status().state is ChildState.STOPPED


async def test_stop_while_it_starts(fixture: Fixture) -> None:
    await fixture.launcher.launch("dummy", spec("exec sleep 600"))
    pid = fixture.status().pid
    waiting = asyncio.create_task(fixture.launcher.wait_ready("dummy"))
    await asyncio.sleep(0)
    await fixture.launcher.stop("dummy", DEADLINE_S)
    with pytest.raises(LauncherError, match="dummy stop"):
        await waiting
    assert pid is not None
    assert is_gone(pid)


async def test_a_name_is_taken_while_it_runs(fixture: Fixture) -> None:
    await fixture.ready()
    with pytest.raises(LauncherError, match="runs already"):
        await fixture.launcher.launch("dummy", spec(SERVES))
    await fixture.launcher.stop("dummy", DEADLINE_S)
    await fixture.ready()
    with pytest.raises(LauncherError, match="never launched"):
        await fixture.launcher.wait_ready("other")


def test_settings_become_flags() -> None:
    command = meshift_command(LaunchSpec("worker", {"page_size": 16, "debug": False, "nats": "nats://h:1"}))
    assert command[0] == sys.executable
    assert command[-6:] == ["worker", "--page-size", "16", "--no-debug", "--nats", "nats://h:1"]
