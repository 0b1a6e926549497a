"""The launcher service over docker compose: what the scheduler asks for, and what it is told."""

import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from meshift.schemas import subjects
from meshift.schemas.errors import Overloaded
from meshift.schemas.identity import Owner
from meshift.schemas.instances import DrainReply, DrainRequest
from meshift.schemas.launching import LauncherReport, LaunchReply, LaunchRequest, LaunchState, ReleaseRequest
from meshift.services.bus.base import ServiceInfo
from meshift.services.bus.memory import MemoryBus, MemoryNetwork
from meshift.services.launcher import LaunchSpec
from meshift.services.launcher.service import LauncherOptions, LauncherService
from tests.unit.launcher.test_compose import Project, name_of

TIMEOUT_S = 20.0
LAUNCHER = "launcher"
OPTIONS = LauncherOptions(instances_max=2, report_interval_s=0.02, grace_s=5.0, backoff_first_s=60.0)


class Scheduler:
    """Asks, and hears reports."""

    def __init__(self, bus: MemoryBus) -> None:
        self.bus = bus
        self.reports: list[LauncherReport] = []

    async def start(self) -> None:
        self.bus.subscribe(subjects.LAUNCHER, LauncherReport, self.reports.append)
        await self.bus.start(ServiceInfo("scheduler", "scheduler"))

    async def launch(self, instances: int, timeout_s: float = 60.0) -> LaunchReply:
        request = LaunchRequest(scheduler_id="s", incarnation=1, instances=instances, timeout_s=timeout_s)
        return await self.bus.request(subjects.launcher_launch(LAUNCHER), request, LaunchReply, timeout_s=TIMEOUT_S)

    async def release(self, name: str) -> LaunchReply:
        request = ReleaseRequest(scheduler_id="s", incarnation=1, owner=Owner(name, 1), deadline_s=30.0)
        return await self.bus.request(subjects.launcher_release(LAUNCHER), request, LaunchReply, timeout_s=TIMEOUT_S)

    @property
    def instances(self) -> dict[str, LaunchState]:
        return {item.instance_id: item.state for item in self.reports[-1].instances} if self.reports else {}


class Running:
    """The service, its project, and who talks to it."""

    def __init__(
        self, project: Project, scheduler: Scheduler, service: LauncherService, network: MemoryNetwork
    ) -> None:
        self.project, self.scheduler, self.service, self.network = project, scheduler, service, network

    async def launched(self, number: int) -> None:
        """One more, ready."""
        await self.scheduler.launch(number)
        await self.project.until(lambda: name_of(number) in self.scheduler.instances)
        self.project.healthy(number)
        await self.project.until(lambda: self.scheduler.instances.get(name_of(number)) is LaunchState.READY)


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    project, network = Project(tmp_path), MemoryNetwork(random.Random(0))
    await project.launcher.start()
    bus = MemoryBus(network, LAUNCHER)
    service = LauncherService(LAUNCHER, 1, bus, project.launcher, lambda name: LaunchSpec("worker"), "m", OPTIONS)
    await service.start()
    scheduler = Scheduler(MemoryBus(network, "scheduler"))
    await scheduler.start()
    yield Running(project, scheduler, service, network)
    await scheduler.bus.close()
    await service.stop()
    await project.launcher.close()


async def test_what_is_launched_is_told_by_the_name_that_it_reports_under(running: Running) -> None:
    await running.launched(1)
    assert running.scheduler.instances == {name_of(1): LaunchState.READY}
    assert (await running.scheduler.launch(1)).instance_id == "", "there is one already"
    await running.launched(2)
    with pytest.raises(Overloaded, match="the most that launcher may have"):
        await running.scheduler.launch(3)
    assert len(running.project.read()) == 2


async def test_what_is_released_drains_first_and_is_stopped_then(running: Running) -> None:
    await running.launched(1)
    await running.launched(2)
    worker = MemoryBus(running.network, name_of(1))
    restarts = []

    def drain(request: DrainRequest) -> DrainReply:
        restarts.append(running.project.read()["0001" * 16]["restart"])
        return DrainReply(owner=Owner(name_of(1), 1), requests_left=3)

    worker.serve("drain", subjects.worker_drain(name_of(1)), DrainRequest, drain)
    await worker.start(ServiceInfo("worker", name_of(1)))
    await running.scheduler.release(name_of(1))
    await running.project.until(lambda: bool(restarts))
    assert restarts == ["no"], "docker would start it again when it has drained"
    reports = len(running.scheduler.reports)
    await running.project.until(lambda: len(running.scheduler.reports) > reports + 5)
    assert running.scheduler.instances[name_of(1)] is LaunchState.RELEASING
    assert running.project.calls("ps")
    assert not (running.project.folder / "calls.jsonl").read_text().count('"stop"'), "it has requests still"
    running.project.set(1, "exited", "Exited (0) 1 second ago")
    await running.project.until(lambda: running.scheduler.instances == {name_of(2): LaunchState.READY})
    assert list(running.project.read()) == ["0002" * 16]
    await worker.close()


async def test_one_that_is_released_before_it_counts_as_ready_is_no_start_that_failed(running: Running) -> None:
    await running.launched(1)
    await running.scheduler.launch(2)
    await running.project.until(lambda: name_of(2) in running.scheduler.instances)
    await running.scheduler.release(name_of(2))
    await running.project.until(lambda: running.scheduler.instances == {name_of(1): LaunchState.READY})
    assert (running.service.launches, running.service.failures) == (2, 0)
    assert (await running.scheduler.launch(2)).report.backoff_s == 0.0


async def test_one_that_never_comes_up_is_removed_and_blocks_nothing(running: Running) -> None:
    await running.launched(1)
    await running.scheduler.launch(2, timeout_s=2.0)
    await running.project.until(lambda: running.service.failures == 1)
    await running.project.until(lambda: running.scheduler.instances == {name_of(1): LaunchState.READY})
    assert list(running.project.read()) == ["0001" * 16]
    with pytest.raises(Overloaded, match="1 starts in a row failed"):
        await running.scheduler.launch(2)
    assert (await running.scheduler.release(name_of(1))).instance_id == name_of(1)
    await running.project.until(lambda: not running.project.read())


async def test_a_compose_that_fails_is_a_start_that_failed(running: Running) -> None:
    running.project.fail({"up": "pull access denied"})
    await running.scheduler.launch(1)
    await running.project.until(lambda: running.service.failures == 1)
    await running.project.until(lambda: "pull access denied" in running.scheduler.reports[-1].last_failure)
    assert running.scheduler.instances == {}
