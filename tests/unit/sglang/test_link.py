"""The worker's end of the sockets to its ranks, with a rank's own outbox at the other end."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import zmq

from meshift.backends.sglang import wire
from meshift.backends.sglang.link import READ_MAX, RankLink

WAIT_S = 20.0


class Listener:
    """What was reported, and an event for so many."""

    def __init__(self, link: RankLink, enough: int) -> None:
        self.phases: list[str] = []
        self.broken: list[str] = []
        self.enough = asyncio.Event()
        self._enough = enough
        link.start(self.hear, self.breaks)

    def hear(self, report: wire.Report) -> None:
        assert isinstance(report, wire.RankPhase)
        self.phases.append(report.phase)
        if report.phase == "bad":
            raise ValueError(report.phase)
        if len(self.phases) == self._enough:
            self.enough.set()

    def breaks(self, reason: str) -> None:
        self.broken.append(reason)
        self.enough.set()


@pytest.fixture
async def link() -> AsyncIterator[RankLink]:
    made = RankLink()
    yield made
    await made.close()
    await made.close()
    assert not made.folder.exists()


@pytest.fixture
def reports(link: RankLink) -> Iterator["zmq.Socket[bytes]"]:
    """A rank's."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
    socket.connect(link.reports_address)
    yield socket
    socket.close(linger=0)


def phases(*names: str) -> list[bytes]:
    return [wire.encode(wire.RankPhase(rank=0, phase=name)) for name in names]


@pytest.mark.parametrize("early", [True, False])
async def test_reports_come_in_order_and_the_loop_gets_its_turns(
    link: RankLink, reports: "zmq.Socket[bytes]", early: bool
) -> None:
    """More than fit into one turn; also those that were there before anybody listened."""
    names = [str(number) for number in range(5 * READ_MAX)]
    listener = None if early else Listener(link, len(names))
    for data in phases(*names):
        reports.send(data)
    listener = listener or Listener(link, len(names))
    async with asyncio.timeout(WAIT_S):
        await listener.enough.wait()
    assert listener.phases == names
    assert not listener.broken


async def test_reports_wake_it_one_by_one(link: RankLink, reports: "zmq.Socket[bytes]") -> None:
    listener = Listener(link, 0)
    for number in range(50):
        reports.send(phases(str(number))[0])
        async with asyncio.timeout(WAIT_S):
            while len(listener.phases) <= number:
                await asyncio.sleep(0)
    assert listener.phases == [str(number) for number in range(50)]


@pytest.mark.parametrize("bad", [b"nonsense", phases("bad")[0]])
async def test_nothing_comes_after_a_report_that_cant_be_handled(
    link: RankLink, reports: "zmq.Socket[bytes]", bad: bytes
) -> None:
    listener = Listener(link, 1_000)
    for data in (*phases("first"), bad, *phases("last")):
        reports.send(data)
    async with asyncio.timeout(WAIT_S):
        await listener.enough.wait()
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(listener.broken) == 1
    assert listener.phases[0] == "first"
    assert "last" not in listener.phases
