"""One fault at one transition of a move, in a small simulated mesh; and what must hold of it afterwards."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from meshift.backends.base import MoveRefused, Refusal
from meshift.backends.sim.parameters import SimParameters
from meshift.schemas.errors import MeshError
from meshift.schemas.moves import MoveMode, MoveOutcome, MoveReport
from meshift.services.frontend.api import Chunk, GenerateRequest
from meshift.services.frontend.core import FrontendOptions
from meshift.services.simulation.mesh import SimulatedMesh, WorkerNode
from meshift.services.simulation.referee import Referee
from meshift.services.worker.moves.destination import Incoming
from meshift.services.worker.moves.destination_table import DestinationEvent
from meshift.services.worker.moves.source import SourceMove
from meshift.services.worker.moves.source_table import SourceEvent
from meshift.services.worker.options import WorkerOptions
from tests.support.mesh_kit import play, read, request, settle, tokens_of, undisturbed
from tests.support.move_kit import OneFault, Operator, record_of, running

Transition = tuple[str, str]
"""State and event; the states of the two tables have different names but for `reserving` and `committing`, and their
events differ."""

CUT_S = 3.0
"""How long what is cut stays cut: longer than source and destination wait for each other."""

LATE_S = 1.5
"""Later than a source waits for an answer, and sooner than a reservation ends."""

SETTLE_S = 14.0
"""Leases (5 s), reservations (10 s) and restarts are over by then."""

LIMIT_S = 200.0
"""The longest that all of it may take, in virtual time."""

OPTIONS: dict[str, Any] = {
    "parameters": SimParameters(capacity=800),
    "worker": WorkerOptions(report_interval_s=0.25, move_timeout_s=0.5, move_freeze_timeout_s=2.0),
    "frontend": FrontendOptions(probe_after_s=0.8),
}


@dataclass
class World:
    """One course: a request, its stream, and the worker that moves it."""

    mesh: SimulatedMesh
    operator: Operator
    ask: GenerateRequest
    source: WorkerNode
    destination: WorkerNode
    reports: list[MoveReport] = field(default_factory=list)
    cancelled: bool = False
    frontend_died: bool = False
    tasks: "list[asyncio.Task[None]]" = field(default_factory=list)

    async def move(self, **options: Any) -> MoveReport | None:
        """Order it; None if nobody answers."""
        try:
            report = await self.operator.move(self.source, self.ask.request_id, self.destination, **options)
        except MeshError:
            return None
        self.reports.append(report)
        return report

    def later(self, delay_s: float, action: Callable[[], object]) -> None:
        asyncio.get_running_loop().call_later(delay_s, action)

    def soon(self, action: Callable[[], object]) -> None:
        """Not in the middle of what takes the event."""
        asyncio.get_running_loop().call_soon(action)

    def spawn(self, work: Awaitable[None]) -> None:
        self.tasks.append(asyncio.ensure_future(work))


Scenario = Callable[[World], Awaitable[object]]
Fault = Callable[[World], object]

# ---- faults


def _message(kind: str, skip: int) -> Fault:
    return lambda world: OneFault(world.mesh, kind, skip).arm()


def _partition(world: World, side: str, other_side: str) -> None:
    cut = world.mesh.faults.partition([side], [other_side])
    world.later(CUT_S, lambda: world.mesh.faults.heal(cut))


def _name(node: WorkerNode) -> str:
    return node.core.owner.instance_id


def _kill(world: World, node: WorkerNode) -> None:
    async def kill() -> None:
        if world.mesh.workers[_name(node)] is node:
            await world.mesh.kill_worker(_name(node))

    world.spawn(kill())


def _kill_frontend(world: World) -> None:
    async def kill() -> None:
        world.frontend_died = True
        await world.mesh.kill_frontend("frontend-0")
        await asyncio.sleep(1.0)
        await world.mesh.start_frontend("frontend-0")

    world.spawn(kill())


def _cut_data_plane(world: World) -> None:
    ends = str(world.source.core.owner), str(world.destination.core.owner)
    world.mesh.fabric.partition(*ends)
    world.later(CUT_S, lambda: world.mesh.fabric.heal(*ends))


def _cancel(world: World) -> None:
    frontend = world.mesh.frontends.get("frontend-0")
    stream = None if frontend is None else frontend._streams.get(world.ask.request_id)
    if frontend is not None and stream is not None:
        world.cancelled = True
        frontend.cancel(stream)


def _close(world: World) -> None:
    """As when its lease ends: at once, unknown to its frontend."""
    found = record_of(world.mesh, world.ask.request_id)
    if found is not None and found[0] is world.source:
        world.source.core._close(found[1].key)


def _drain(node: WorkerNode) -> None:
    if node.serves:
        node.core.drain(1.0)


FAULTS: dict[str, Fault] = {
    "nothing": lambda world: None,
    "drop": _message("drop", 0),
    "drop-second": _message("drop", 1),
    "delay": _message("delay", 0),
    "delay-second": _message("delay", 1),
    "duplicate": _message("duplicate", 0),
    "duplicate-second": _message("duplicate", 1),
    "kill-source": lambda world: _kill(world, world.source),
    "kill-destination": lambda world: _kill(world, world.destination),
    "kill-frontend": _kill_frontend,
    "crash-source-engine": lambda world: world.source.engine.crash("fault"),
    "crash-destination-engine": lambda world: world.destination.engine.crash("fault"),
    "cut-data-plane": _cut_data_plane,
    "cut-workers": lambda world: _partition(world, _name(world.source), _name(world.destination)),
    "cut-source-frontend": lambda world: _partition(world, _name(world.source), "frontend-0"),
    "cut-destination-frontend": lambda world: _partition(world, _name(world.destination), "frontend-0"),
    "close-source": _close,
    "cancel": lambda world: world.soon(lambda: _cancel(world)),
    "drain-destination": lambda world: world.soon(lambda: _drain(world.destination)),
    "drain-source": lambda world: world.soon(lambda: _drain(world.source)),
}

# ---- courses


async def live(world: World) -> None:
    await world.move()


async def blocking(world: World) -> None:
    await world.move(mode=MoveMode.BLOCKING)


async def recompute(world: World) -> None:
    await world.move(mode=MoveMode.RECOMPUTE)


async def again(world: World) -> None:
    """A move is given up, and tried again with the same destination."""
    given_up = await world.move(deadline_s=0.02)
    if given_up is not None and given_up.outcome is MoveOutcome.STAYED:
        await world.move()


async def unanswered(world: World) -> None:
    """The commit's answer is lost."""
    OneFault(world.mesh, "drop", 1, (".move-commit",)).arm()
    await world.move()


async def unheard(world: World) -> None:
    """The commit arrives; nothing comes back from there but to the frontend."""
    _cut_after_commit(world, {(_name(world.destination), _name(world.source))})
    await world.move()


async def undecided(world: World) -> None:
    """Likewise, nor to the frontend."""
    there = _name(world.destination)
    _cut_after_commit(world, {(there, _name(world.source)), (there, "frontend-0")})
    await world.move()


async def severed(world: World) -> None:
    """The commit arrives; after that nothing does between the two, in either direction."""
    here, there = _name(world.source), _name(world.destination)
    _cut_after_commit(world, {(there, here), (here, there)})
    await world.move()


async def severed_undecided(world: World) -> None:
    """Likewise, nor between the destination and the frontend."""
    here, there = _name(world.source), _name(world.destination)
    _cut_after_commit(world, {(there, here), (here, there), (there, "frontend-0"), ("frontend-0", there)})
    await world.move()


async def late_commit(world: World) -> None:
    """The commit comes when its source has asked about it, and has gone on; that it has given it up isn't heard."""
    usual = world.mesh.faults.copies
    OneFault(world.mesh, "delay", 0, (".move-commit",), delay_s=LATE_S).arm()
    delayed = world.mesh.faults.copies

    def copies(sender: str, receiver: str, subject: str) -> tuple[int, ...]:
        return () if ".move-abort" in subject else delayed(sender, receiver, subject)

    world.mesh.faults.copies = copies  # type: ignore[method-assign]
    await world.move()
    await asyncio.sleep(2 * LATE_S)
    world.mesh.faults.copies = usual  # type: ignore[method-assign]


def _cut_after_commit(world: World, links: set[tuple[str, str]]) -> None:
    """These links, for a while, from when the commit has been sent."""
    usual = world.mesh.faults.copies
    until_s: list[float] = []

    def copies(sender: str, receiver: str, subject: str) -> tuple[int, ...]:
        now_s = asyncio.get_running_loop().time()
        if ".move-commit" in subject and not until_s:
            until_s.append(now_s + CUT_S)
            return usual(sender, receiver, subject)
        cut = until_s and now_s < until_s[0] and (sender, receiver) in links
        return () if cut else usual(sender, receiver, subject)

    world.mesh.faults.copies = copies  # type: ignore[method-assign]
    world.mesh.faults.active = True


async def drain(world: World) -> None:
    """The source drains."""
    world.source.core.drain(40.0)
    await asyncio.sleep(3.0)


def refusing(course: Scenario, end: str, method: str, refusal: Refusal, calls: int = 1) -> Scenario:
    """The course with an engine that refuses one call: the `calls`-th of `method`."""

    async def refused(world: World) -> None:
        engine: Any = (world.source if end == "source" else world.destination).engine
        usual = getattr(engine, method)
        left = calls

        async def call(*arguments: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise MoveRefused(f"{method}: {refusal}", refusal)
            return await usual(*arguments)

        setattr(engine, method, call)
        await course(world)

    return refused


COURSES: dict[str, Scenario] = {
    "live": live,
    "blocking": blocking,
    "recompute": recompute,
    "again": again,
    "unanswered": unanswered,
    "unheard": unheard,
    "undecided": undecided,
    "severed": severed,
    "severed-undecided": severed_undecided,
    "late-commit": late_commit,
    "drain": drain,
    "busy": refusing(live, "source", "begin_move", Refusal.BUSY),
    "copy-preempted": refusing(live, "source", "send_delta", Refusal.PREEMPTED),
    "copy-broken": refusing(live, "source", "send_delta", Refusal.BROKEN),
    "copy-broken-drain": refusing(drain, "source", "send_delta", Refusal.BROKEN),
    "freeze-preempted": refusing(live, "source", "freeze", Refusal.PREEMPTED),
    "freeze-outgrown": refusing(live, "source", "freeze", Refusal.NO_ROOM),
    "freeze-broken": refusing(live, "source", "freeze", Refusal.BROKEN),
    "freeze-broken-drain": refusing(drain, "source", "freeze", Refusal.BROKEN),
    "no-room": refusing(live, "destination", "reserve", Refusal.NO_ROOM),
    "no-room-later": refusing(live, "destination", "reserve", Refusal.NO_ROOM, 2),
    "no-room-drain": refusing(drain, "destination", "reserve", Refusal.NO_ROOM),
    "commit-broken": refusing(live, "destination", "commit", Refusal.BROKEN),
}

# ---- running one


class Watch:
    """Sees every transition, and lets the fault happen at the `at`-th."""

    def __init__(self, at: int | None) -> None:
        self.at = at
        self.seen: list[Transition] = []
        self.fault: Callable[[], object] = lambda: None

    def note(self, state: str, event: str) -> None:
        """One table takes an event."""
        self.seen.append((state, event))
        if len(self.seen) - 1 == self.at:
            self.fault()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """All moves, inside."""
        usual_source, usual_incoming = SourceMove._take, Incoming.take
        watch = self

        def take_source(self: SourceMove, event: SourceEvent) -> None:
            watch.note(f"source {self.state}", event.value)
            usual_source(self, event)

        def take_incoming(self: Incoming, event: DestinationEvent) -> Any:
            watch.note(f"destination {self.state}", event.value)
            return usual_incoming(self, event)

        SourceMove._take = take_source  # type: ignore[method-assign]
        Incoming.take = take_incoming  # type: ignore[method-assign]
        try:
            yield
        finally:
            SourceMove._take = usual_source  # type: ignore[method-assign]
            Incoming.take = usual_incoming  # type: ignore[method-assign]


ASK = request("m", 60, 150)
_whole: list[int] = []


def expected() -> list[int]:
    """What an undisturbed engine gives."""
    if not _whole:
        _whole.extend(undisturbed(ASK))
    return _whole


def run_course(course: str, fault: str, at: int | None) -> list[Transition]:
    """Play it. Returns the transitions that were seen. Raises AssertionError if an invariant is broken."""
    watch, whole = Watch(at), expected()

    async def scenario(mesh: SimulatedMesh) -> None:
        referee = Referee(mesh, 0.01)
        referee.start()
        reading = asyncio.get_running_loop().create_task(read(mesh.frontends["frontend-0"], ASK))
        operator = await Operator.join(mesh)
        source, _ = await running(mesh, ASK.request_id, 3)
        (destination,) = [node for node in mesh.workers.values() if node is not source]
        world = World(mesh, operator, ASK, source, destination)
        watch.fault = lambda: FAULTS[fault](world)
        async with asyncio.timeout(LIMIT_S):
            await COURSES[course](world)
            await _check_stream(world, reading, whole)
            for task in world.tasks:
                await task
        await settle(mesh, settle_s=SETTLE_S)
        referee.check()
        if fault == "nothing":
            assert mesh.frontends["frontend-0"].counters.resumes == 0, "it was nobody's for a while"

    with watch.watching():
        play(scenario, **OPTIONS)
    return watch.seen


async def _check_stream(world: World, reading: "asyncio.Task[list[Chunk]]", whole: list[int]) -> None:
    """Exact, unless its client or its frontend ended it."""
    if world.cancelled or world.frontend_died:
        with suppress(StopAsyncIteration):
            await reading
        return
    chunks = await reading
    if world.cancelled or world.frontend_died:
        return
    assert tokens_of(chunks) == whole
