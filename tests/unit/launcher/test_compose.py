"""ComposeLauncher, with a fake `docker`."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from meshift.services.launcher import ChildState, LauncherError, LaunchSpec
from meshift.services.launcher.compose import ComposeLauncher, ComposeProject
from meshift.services.launcher.docker import Container, Docker, child_state, parse_containers
from meshift.services.launcher.lifecycle import ENDED
from meshift.services.launcher.main import LauncherSettings, project_name, project_of

DEADLINE_S = 20.0
POLL_S = 0.1
SPEC = LaunchSpec("worker")
FAKE = Path(__file__).with_name("fake_docker.py")


def name_of(number: int) -> str:
    return f"worker-{f'{number:04}' * 3}"


class Project:
    """What the fake docker has, and a launcher that uses it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write({})
        self.fail({})
        docker = (sys.executable, "-S", "-E", str(FAKE), str(folder))
        file = folder / "docker-compose.yml"
        self.launcher = ComposeLauncher(ComposeProject((file,), "mesh", "worker", docker, (*docker, "compose")), POLL_S)

    def write(self, containers: dict[str, Any]) -> None:
        (self.folder / "draft").write_text(json.dumps(containers))
        (self.folder / "draft").replace(self.folder / "containers.json")

    def read(self) -> dict[str, Any]:
        content = json.loads((self.folder / "containers.json").read_text())
        assert isinstance(content, dict)
        return content

    def fail(self, faults: dict[str, str]) -> None:
        """What commands end with from now on: `hang`, `half` (made, and then an error), or a complaint."""
        (self.folder / "faults.json").write_text(json.dumps(faults))

    def set(self, number: int, state: str, status: str) -> None:
        containers = self.read()
        containers[f"{number:04}" * 16] |= {"state": state, "status": status}
        self.write(containers)

    def healthy(self, number: int) -> None:
        self.set(number, "running", "Up 5 seconds (healthy)")

    def calls(self, command: str) -> list[list[str]]:
        lines = (self.folder / "calls.jsonl").read_text().splitlines()
        return [words for words in map(json.loads, lines) if words[0] == command]

    def states(self) -> dict[str, ChildState]:
        return {status.instance_id: status.state for status in self.launcher.list()}

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.01)


@pytest.fixture
async def project(tmp_path: Path) -> AsyncIterator[Project]:
    project = Project(tmp_path)
    await project.launcher.start()
    yield project
    await project.launcher.close()


async def test_a_launch_makes_one_container_and_takes_its_name(project: Project) -> None:
    assert await project.launcher.launch("worker-1", SPEC) == name_of(1)
    assert project.states() == {name_of(1): ChildState.STARTING}
    waiting = asyncio.create_task(project.launcher.wait_ready(name_of(1)))
    assert await project.launcher.launch("worker-2", SPEC) == name_of(2)
    assert not waiting.done()
    project.healthy(1)
    async with asyncio.timeout(DEADLINE_S):
        await waiting
    assert project.states() == {name_of(1): ChildState.READY, name_of(2): ChildState.STARTING}
    assert [words[-2] for words in project.calls("compose")] == ["worker=1", "worker=2"]


async def test_two_launches_at_once_make_two(project: Project) -> None:
    names = await asyncio.gather(project.launcher.launch("a", SPEC), project.launcher.launch("b", SPEC))
    assert sorted(names) == [name_of(1), name_of(2)]


async def test_a_stop_removes_that_one_and_the_next_launch_adds_one(project: Project) -> None:
    for number in (1, 2, 3):
        await project.launcher.launch("x", SPEC)
        project.healthy(number)
    await project.launcher.retire(name_of(2))
    assert [item["restart"] for item in project.read().values()] == ["unless-stopped", "no", "unless-stopped"]
    await project.launcher.stop(name_of(2), 2.5)
    assert sorted(project.states()) == [name_of(1), name_of(3)]
    assert project.calls("stop") == [["stop", "--time", "3", "0002" * 16]]
    assert await project.launcher.launch("x", SPEC) == name_of(4)
    assert project.calls("compose")[-1][-2] == "worker=3"


async def test_containers_that_were_there_are_known_and_stay(project: Project) -> None:
    await project.launcher.launch("x", SPEC)
    project.healthy(1)
    later = ComposeLauncher(project.launcher._project, POLL_S)
    await later.start()
    await later.wait_ready(name_of(1))
    await later.close()
    assert len(project.read()) == 1


async def test_one_that_left_is_not_started_again_by_the_next_launch(project: Project) -> None:
    await project.launcher.launch("x", SPEC)
    project.healthy(1)
    await project.launcher.wait_ready(name_of(1))
    project.set(1, "exited", "Exited (0) 2 seconds ago")
    await project.until(lambda: project.states() == {name_of(1): ChildState.STOPPED})
    assert await project.launcher.launch("x", SPEC) == name_of(1)
    assert project.calls("rm") == [["rm", "--force", "0001" * 16]]


@pytest.mark.parametrize("state", ["restarting", "exited", "dead"])
async def test_one_that_ends_before_it_was_ready_has_failed(project: Project, state: str) -> None:
    await project.launcher.launch("x", SPEC)
    waiting = asyncio.create_task(project.launcher.wait_ready(name_of(1)))
    project.set(1, state, "Restarting (1) 1 second ago")
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(LauncherError, match="the last words of 0001"):
            await waiting


async def test_one_that_was_ready_and_restarts_is_waited_for(project: Project) -> None:
    await project.launcher.launch("x", SPEC)
    project.healthy(1)
    await project.launcher.wait_ready(name_of(1))
    project.set(1, "restarting", "Restarting (70) 1 second ago")
    await project.until(lambda: project.states()[name_of(1)] is ChildState.BACKOFF)
    waiting = asyncio.create_task(project.launcher.wait_ready(name_of(1)))
    project.set(1, "running", "Up 1 second (health: starting)")
    await project.until(lambda: project.states()[name_of(1)] is ChildState.STARTING)
    assert not waiting.done()
    project.healthy(1)
    async with asyncio.timeout(DEADLINE_S):
        await waiting
    assert project.launcher.list()[0].restarts == 1


async def test_one_that_vanishes_is_no_more(project: Project) -> None:
    await project.launcher.launch("x", SPEC)
    waiting = asyncio.create_task(project.launcher.wait_ready(name_of(1)))
    project.write({})
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(LauncherError, match="has no container"):
            await waiting
    with pytest.raises(LauncherError, match="has no container"):
        await project.launcher.stop(name_of(1), 0.0)


async def test_what_docker_complains_of_is_told_and_leaves_nothing(project: Project) -> None:
    project.fail({"up": "no space left on device"})
    with pytest.raises(LauncherError, match="no space left on device"):
        await project.launcher.launch("x", SPEC)
    project.fail({"up": "half"})
    with pytest.raises(LauncherError, match="made, but can't be started"):
        await project.launcher.launch("x", SPEC)
    assert project.read() == {}
    project.fail({})
    assert await project.launcher.launch("x", SPEC) == name_of(1)


async def test_a_launch_that_hangs_can_be_given_up_and_blocks_no_other(project: Project) -> None:
    project.fail({"up": "hang"})
    launching = asyncio.create_task(project.launcher.launch("x", SPEC))
    await project.until(lambda: (project.folder / "calls.jsonl").exists() and bool(project.calls("compose")))
    launching.cancel()
    project.fail({})
    with pytest.raises(asyncio.CancelledError):
        await launching
    assert project.read() == {}
    async with asyncio.timeout(DEADLINE_S):
        assert await project.launcher.launch("x", SPEC) == name_of(1)


async def test_a_docker_that_is_away_for_a_while_is_asked_again(
    project: Project, caplog: pytest.LogCaptureFixture
) -> None:
    await project.launcher.launch("x", SPEC)
    project.fail({"ps": "is the daemon running?"})
    await project.until(lambda: "is the daemon running?" in caplog.text)
    asked = len(project.calls("ps"))
    await project.until(lambda: len(project.calls("ps")) > asked + 3)
    assert caplog.text.count("is the daemon running?") == 1
    project.healthy(1)
    project.fail({})
    async with asyncio.timeout(DEADLINE_S):
        await project.launcher.wait_ready(name_of(1))


async def test_a_command_has_a_deadline_and_a_program() -> None:
    with pytest.raises(LauncherError, match=r"took longer than 0\.2 s"):
        await Docker(("sleep",)).run("600", timeout_s=0.2)
    with pytest.raises(LauncherError, match="can't be run: No such file"):
        await Docker(("/no/such/docker",)).run("ps", timeout_s=1.0)


def test_what_docker_ps_says_is_read() -> None:
    text = "aa\trunning\tUp 2 hours (healthy)\nbb\trunning\tUp 1 second (health: starting)\ncc\texited\tExited (0)\n"
    assert [item.health for item in parse_containers(text)] == ["healthy", "starting", ""]
    with pytest.raises(LauncherError, match="docker ps says"):
        parse_containers("error")


@pytest.mark.parametrize(
    ("state", "health", "was_ready", "expected"),
    [
        ("running", "", False, ChildState.READY),
        ("running", "unhealthy", False, ChildState.STARTING),
        ("running", "unhealthy", True, ChildState.READY),
        ("created", "", False, ChildState.STARTING),
        ("exited", "", True, ChildState.STOPPED),
        ("exited", "", False, ChildState.FAILED),
        ("dead", "", True, ChildState.STOPPED),
    ],
)
def test_states(state: str, health: str, was_ready: bool, expected: ChildState) -> None:
    found = child_state(Container("x", state, health), was_ready)
    assert found is expected
    assert (found in ENDED) == (state in ("exited", "dead"))


def test_a_project_is_named_as_compose_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "My Mesh.1"
    folder.mkdir()
    file = folder / "docker-compose.yml"
    file.write_text("")
    settings = LauncherSettings(compose_file=(file,))
    monkeypatch.delenv("COMPOSE_PROJECT_NAME", raising=False)
    assert project_name(settings) == "mymesh1"
    monkeypatch.setenv("COMPOSE_PROJECT_NAME", "other")
    assert project_name(settings) == "other"
    assert project_name(settings.model_copy(update={"project": "named"})) == "named"


def test_docker_compose_of_its_own_is_used_where_docker_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "docker-compose.yml"
    file.write_text("")
    settings = LauncherSettings(compose_file=(file,), project="p")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(LauncherError, match="no `docker`"):
        project_of(settings)
    with pytest.raises(LauncherError, match="is no file"):
        project_of(LauncherSettings(compose_file=(tmp_path / "none.yml",)))
    for name in ("docker", "docker-compose"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text("")
        program.chmod(0o755)
    plugins = tmp_path / "config" / "cli-plugins"
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "config"))
    monkeypatch.setattr("meshift.services.launcher.main.SYSTEM_PLUGINS", ())
    assert project_of(settings).compose == (str(tmp_path / "bin" / "docker-compose"),)
    plugins.mkdir(parents=True)
    (plugins / "docker-compose").write_text("")
    assert project_of(settings).compose == (str(tmp_path / "bin" / "docker"), "compose")
