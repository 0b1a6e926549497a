"""`meshift status` against a mesh in memory, in virtual time."""

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from meshift.schemas import subjects
from meshift.schemas.instances import InstanceState, LoadReport, StatusRequest, WorkerStatus
from meshift.services.bus.base import Bus, ServiceInfo
from meshift.services.bus.memory import MemoryBus, MemoryNetwork
from meshift.services.cli import status
from meshift.services.cli.main import main
from meshift.services.periodic import Periodic
from meshift.services.simulation import virtual_time
from tests.support.reports import load_report

REPORT_INTERVAL_S = 0.1


class Worker:
    """Reports its load, and answers an operator if it is told to."""

    def __init__(self, network: MemoryNetwork, report: LoadReport, answers: bool = True) -> None:
        name = report.owner.instance_id
        self.bus = MemoryBus(network, f"bus of {report.owner}")
        self.report = report
        self.periodic = Periodic(REPORT_INTERVAL_S, lambda: self.bus.publish(subjects.worker_load(name), self.report))
        if answers:
            self.bus.serve("status", subjects.worker_status(name), StatusRequest, self._status)

    async def start(self) -> None:
        await self.bus.start(ServiceInfo("worker", self.report.owner.instance_id))
        self.periodic.start()

    async def stop(self) -> None:
        self.periodic.stop()
        await self.bus.close()
        assert self.periodic.failures == 0

    def _status(self, _: StatusRequest) -> WorkerStatus:
        return WorkerStatus(load=self.report, engine="sglang", ranks=(11, 12), requests=2, unacknowledged=0)


def with_workers(
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[MemoryNetwork], list[Worker]],
    command: Callable[[], Awaitable[object]],
) -> object:
    """Run a command while workers report."""

    async def run() -> object:
        network = MemoryNetwork(random.Random(0))

        @asynccontextmanager
        async def joined(nats_url: str) -> AsyncIterator[Bus]:
            bus = MemoryBus(network, "command")
            await bus.start(ServiceInfo("command", "command-1"))
            try:
                yield bus
            finally:
                await bus.close()

        monkeypatch.setattr(status, "joined_bus", joined)
        workers = make(network)
        for worker in workers:
            await worker.start()
        try:
            return await command()
        finally:
            for worker in workers:
                await worker.stop()

    return virtual_time.run(run())


def test_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def make(network: MemoryNetwork) -> list[Worker]:
        busy = load_report("b", 7, used=600, cached=100, free=300, running=4, waiting=2, state=InstanceState.DRAINING)
        busy = busy.model_copy(update={"layers": (16, 14), "layout_epoch": 2, "layout_change": "c1"})
        return [Worker(network, busy), Worker(network, load_report("a", 5), answers=False)]

    assert with_workers(monkeypatch, make, lambda: status.show("nats://x", 0.3)) == 0
    assert capsys.readouterr().out.splitlines() == [
        "INSTANCE  INCARNATION  STATE     MODEL  RUN  WAIT  USED/CAPACITY  FREE  LAYERS             ENGINE  PIDS",
        "a         5            ready     m        0     0         0/1000  1000  -                  ?       ?",
        "b         7            draining  m        4     2       600/1000   300  16/14 @2 changing  sglang  11,12",
    ]


def test_of_two_lives_the_newer_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def make(network: MemoryNetwork) -> list[Worker]:
        return [Worker(network, load_report("a", life), answers=False) for life in (2, 3, 1)]

    assert with_workers(monkeypatch, make, lambda: status.show("nats://x", 0.3)) == 0
    (row,) = capsys.readouterr().out.splitlines()[1:]
    assert row.split()[:2] == ["a", "3"]


def test_silence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert with_workers(monkeypatch, lambda _: [], lambda: status.show("nats://x", 0.3)) == 1
    assert capsys.readouterr().out == "no instance reports at nats://x\n"


def test_a_name_that_can_not_be_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain", "no.such*name"]) == 2
    assert "must be 1 to 64 letters" in capsys.readouterr().err


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("meshift.services.cli.client.CONNECT_TIMEOUT_S", 0.05)
    assert main(["status", "--nats", "nats://127.0.0.1:1"]) == 1
    captured = capsys.readouterr()
    assert captured.err == "meshift status: no mesh answers at nats://127.0.0.1:1; `meshift up` starts one\n"
