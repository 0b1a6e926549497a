"""Reconfigurations in a whole mesh: an instance changes shape while it serves, and whatever fails on the way, it ends
in the old layout or the new one, serving, with every stream exact."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from meshift.backends.layouts import LayoutRefused
from meshift.backends.sim.parameters import SimParameters
from meshift.backends.sim.pipeline import SimPipeline, SimStage
from meshift.schemas import subjects
from meshift.schemas.errors import NotFound
from meshift.schemas.identity import Owner
from meshift.schemas.instances import InstanceState
from meshift.schemas.layouts import CommitMode, LayoutFlags, LayoutRefusal, counts_of
from meshift.schemas.moves import MoveMode, MoveOrder
from meshift.schemas.reconfiguring import (
    ReconfigurationsReply,
    ReconfigurationsRequest,
    ReconfigureBody,
    ReconfigureCancel,
    ReconfigureOrder,
    ReconfigureOutcome,
    ReconfigureReport,
    WorkerPhase,
)
from meshift.services.bus.memory import MemoryBus
from meshift.services.coordinator.table import State
from meshift.services.simulation.mesh import SimulatedMesh
from meshift.services.worker.layouts.table import FINAL
from meshift.services.worker.options import WorkerOptions
from tests.support.mesh_kit import Pending, eight, outsider, play, streams

PIPELINE = SimPipeline.even(2, 32)
THREE = SimPipeline.even(3, 32)
NAME = "worker-0"
WAIT_S = 300.0
LEASE_S = 2.0


def play_reconfigure(scenario: Callable[[SimulatedMesh], Awaitable[None]], **options: Any) -> None:
    chosen = {"pipeline": PIPELINE, "instances": 1, "worker": WorkerOptions(layout_lease_s=LEASE_S)} | options
    play(scenario, **chosen)


async def reconfigure(bus: MemoryBus, layers: tuple[int, ...], name: str = NAME, /, **body: Any) -> ReconfigureReport:
    order = ReconfigureOrder(instance_id=name, body=ReconfigureBody(layers=layers, **({"wait": True} | body)))
    return await bus.request(subjects.RECONFIGURE, order, ReconfigureReport, timeout_s=WAIT_S)


async def listed(bus: MemoryBus) -> ReconfigurationsReply:
    return await bus.request(
        subjects.RECONFIGURATIONS, ReconfigurationsRequest(), ReconfigurationsReply, timeout_s=WAIT_S
    )


async def split_of_worker(mesh: SimulatedMesh, name: str = NAME) -> tuple[int, ...]:
    return counts_of((await mesh.workers[name].engine.layout()).layout.layer_ranges)


async def until(condition: Callable[[], object], what: str, poll_s: float = 0.005) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(poll_s)


async def running(mesh: SimulatedMesh, asks: Any) -> Pending:
    """Streams of which tokens have come."""
    pending = streams(mesh, asks)
    core = mesh.workers[NAME].core
    await until(lambda: len(list(core.requests)) == len(asks) and all(r.end > 2 for r in core.requests), "tokens")
    return pending


async def whole(mesh: SimulatedMesh, pending: Pending) -> None:
    """Every stream is exact; afterwards nothing is left."""
    await pending.all_exact()
    await asyncio.sleep(3.0)
    for node in mesh.workers.values():
        await node.engine.check_integrity()
        load = node.engine.load()
        assert (load.used, load.reserved, load.running) == (0, 0, 0)
        assert node.core.state is InstanceState.READY
        assert node.core.layouts.change_id == ""
        assert (await node.engine.layout()).change_id is None
        assert node.core.moves.under_way() == 0


@pytest.mark.parametrize("commit", CommitMode)
@pytest.mark.parametrize("target", [(20, 12), (12, 20), (32, 0), (0, 32)], ids=str)
def test_an_instance_changes_shape_while_it_serves(commit: CommitMode, target: tuple[int, int]) -> None:
    asks = eight()

    async def scenario(mesh: SimulatedMesh) -> None:
        bus, pending = await outsider(mesh), await running(mesh, asks)
        report = await reconfigure(bus, target, commit=commit)
        assert (report.outcome, report.refusal, report.reason) == (ReconfigureOutcome.COMMITTED, None, "")
        assert await split_of_worker(mesh) == target
        assert report.epoch == 1
        assert report.change is not None
        assert report.change.committed is commit
        assert len(report.change.stop_ns) == 2
        phases = {"planning", "beginning", "resizing", "loading", "converging", "committing"}
        assert phases == set(report.phases_s)
        assert sum(report.phases_s.values()) == pytest.approx(report.duration_s)
        assert report.lag_tokens[-1][1] <= report.change.orders.tau_tokens
        await asyncio.sleep(0.5)
        load = mesh.frontends["frontend-0"].instances()[0]
        assert (load.layers, load.layout_epoch, load.layout_change) == (target, 1, "")
        reply = await listed(bus)
        assert [ended.change_id for ended in reply.ended] == [report.change_id]
        assert reply.running == ()
        await whole(mesh, pending)

    play_reconfigure(scenario)


@pytest.mark.parametrize(
    "flags",
    [LayoutFlags(no_patch=True), LayoutFlags(no_patch=True, no_async=True), LayoutFlags(restart=True)],
    ids=lambda flags: ",".join(sorted(flags.model_fields_set)),
)
def test_what_is_left_out_costs_time_and_no_token(flags: LayoutFlags) -> None:
    asks = eight()

    async def scenario(mesh: SimulatedMesh) -> None:
        bus, pending = await outsider(mesh), await running(mesh, asks)
        stops = []
        for layers, chosen in (((20, 12), LayoutFlags()), ((16, 16), flags)):
            report = await reconfigure(bus, layers, flags=chosen)
            assert report.outcome is ReconfigureOutcome.COMMITTED, report.reason
            assert report.change is not None
            stops.append(max(report.change.stop_ns))
        assert stops[1] > 5 * stops[0]
        await whole(mesh, pending)

    play_reconfigure(scenario)


def test_three_stages_back_and_forth() -> None:
    asks = eight()

    async def scenario(mesh: SimulatedMesh) -> None:
        bus, pending = await outsider(mesh), await running(mesh, asks)
        for layers in ((32, 0, 0), (4, 8, 20), (0, 32, 0), (12, 8, 12), (0, 0, 32), (8, 12, 12)):
            report = await reconfigure(bus, layers)
            assert report.outcome is ReconfigureOutcome.COMMITTED, report.reason
        assert report.epoch == 6
        await whole(mesh, pending)

    play_reconfigure(scenario, pipeline=THREE)


# ---- plans and refusals


def test_a_dry_run_changes_nothing() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        bus = await outsider(mesh)
        report = await reconfigure(bus, (20, 12), dry_run=True)
        assert report.outcome is ReconfigureOutcome.PLANNED
        assert report.plan is not None
        assert report.plan.words[0] == "16/16 -> 20/12 layers, epoch 0"
        assert await split_of_worker(mesh) == (16, 16)
        assert (await listed(bus)).ended == ()
        bad = await reconfigure(bus, (17, 15), dry_run=True)
        assert bad.plan is not None
        assert (bad.outcome, bad.plan.refusal) == (ReconfigureOutcome.PLANNED, LayoutRefusal.UNALIGNED)
        assert bad.plan.nearest == ((16, 16), (20, 12))

    play_reconfigure(scenario)


@pytest.mark.parametrize(
    ("layers", "refusal"),
    [
        ((16, 16), LayoutRefusal.UNCHANGED),
        ((17, 15), LayoutRefusal.UNALIGNED),
        ((16, 12), LayoutRefusal.INVALID),
        ((16, 8, 8), LayoutRefusal.INVALID),
    ],
    ids=str,
)
def test_what_is_refused(layers: tuple[int, ...], refusal: LayoutRefusal) -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        report = await reconfigure(await outsider(mesh), layers)
        assert (report.outcome, report.refusal) == (ReconfigureOutcome.REFUSED, refusal)
        assert report.reason

    play_reconfigure(scenario)


def test_an_unknown_instance_and_an_engine_without_stages() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        bus = await outsider(mesh)
        with pytest.raises(NotFound) as caught:
            await reconfigure(bus, (20, 12), "worker-9")
        assert caught.value.param == "instance_id"
        mesh.workers[NAME].core.layouts._engine = None
        report = await reconfigure(bus, (20, 12))
        assert (report.outcome, report.refusal) == (ReconfigureOutcome.REFUSED, LayoutRefusal.UNSUPPORTED)

    play_reconfigure(scenario)


def test_one_at_a_time_and_a_cancel() -> None:
    asks = eight()

    async def scenario(mesh: SimulatedMesh) -> None:
        bus, pending = await outsider(mesh), await running(mesh, asks)
        first = await reconfigure(bus, (20, 12), wait=False, bytes_per_s=1e6)
        assert first.outcome is None
        second = await reconfigure(bus, (12, 20))
        assert (second.outcome, second.refusal) == (ReconfigureOutcome.REFUSED, LayoutRefusal.BUSY)
        await bus.request(
            subjects.RECONFIGURE_CANCEL, ReconfigureCancel(instance_id=NAME), ReconfigureReport, timeout_s=WAIT_S
        )
        assert mesh.coordinator is not None
        coordinator = mesh.coordinator
        await until(lambda: not coordinator.running(), "its end")
        ended = (await listed(bus)).ended[-1]
        assert (ended.outcome, ended.refusal) == (ReconfigureOutcome.ABORTED, LayoutRefusal.CANCELLED)
        assert await split_of_worker(mesh) == (16, 16)
        with pytest.raises(NotFound):
            await bus.request(
                subjects.RECONFIGURE_CANCEL, ReconfigureCancel(instance_id=NAME), ReconfigureReport, timeout_s=WAIT_S
            )
        await whole(mesh, pending)

    play_reconfigure(scenario)


def test_a_deadline_undoes_it() -> None:
    asks = eight()

    async def scenario(mesh: SimulatedMesh) -> None:
        bus, pending = await outsider(mesh), await running(mesh, asks)
        report = await reconfigure(bus, (20, 12), bytes_per_s=1e5, deadline_s=1.0)
        assert (report.outcome, report.refusal) == (ReconfigureOutcome.ABORTED, LayoutRefusal.DEADLINE)
        assert await split_of_worker(mesh) == (16, 16)
        await whole(mesh, pending)

    play_reconfigure(scenario)


# ---- memory

PARAMETERS = SimParameters(capacity=3200)


def tight_pipeline(pages: int) -> SimPipeline:
    """Stage 0 has room for 24 layers with that many pages."""
    block = PIPELINE.block_bytes(PARAMETERS)
    budget = 24 * PIPELINE.layer_weight_bytes + 6 * block * pages
    stages = (SimStage(memory_bytes=budget), SimStage())
    return PIPELINE.model_copy(update={"stages": stages, "capacity_max": 16_000})


def test_capacity_shrinks_meanwhile_and_grows_afterwards() -> None:
    asks = eight()

    async def scenario(mesh: SimulatedMesh) -> None:
        bus, pending = await outsider(mesh), await running(mesh, asks)
        engine = mesh.workers[NAME].engine
        report = await reconfigure(bus, (24, 8))
        assert report.outcome is ReconfigureOutcome.COMMITTED, report.reason
        assert report.plan is not None
        assert (report.plan.capacity_during, report.plan.capacity_after) == (1600, 1600)
        assert engine.load().capacity == 1600
        report = await reconfigure(bus, (16, 16))
        assert engine.load().capacity == report.plan.capacity_after > 3200  # type: ignore[union-attr]
        assert report.plan.capacity_during == 1600  # type: ignore[union-attr]
        await whole(mesh, pending)

    play_reconfigure(scenario, pipeline=tight_pipeline(100), parameters=PARAMETERS)


def test_an_abort_gives_the_capacity_back() -> None:
    asks = eight()

    async def scenario(mesh: SimulatedMesh) -> None:
        bus, pending = await outsider(mesh), await running(mesh, asks)
        report = await reconfigure(bus, (24, 8), bytes_per_s=1e5, deadline_s=1.0)
        assert (report.outcome, report.refusal) == (ReconfigureOutcome.ABORTED, LayoutRefusal.DEADLINE)
        assert mesh.workers[NAME].engine.load().capacity == 3200
        await whole(mesh, pending)

    play_reconfigure(scenario, pipeline=tight_pipeline(100), parameters=PARAMETERS)


def test_what_does_not_fit_is_refused_and_without_resizing_more_is() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        bus = await outsider(mesh)
        kept = await reconfigure(bus, (24, 8), flags=LayoutFlags(no_resize=True))
        assert (kept.outcome, kept.refusal) == (ReconfigureOutcome.REFUSED, LayoutRefusal.NO_MEMORY)
        never = await reconfigure(bus, (32, 0))
        assert (never.outcome, never.refusal) == (ReconfigureOutcome.REFUSED, LayoutRefusal.NO_MEMORY)

    play_reconfigure(scenario, pipeline=tight_pipeline(100), parameters=PARAMETERS)


# ---- whatever fails

SWAPPED, HOME = (16, 8, 8), (8, 8, 16)
"""The stage in the middle gives its layers to the first one and takes as many from the last: it holds twice as many
meanwhile, so that capacity shrinks and grows again."""


def swapping() -> dict[str, Any]:
    """Room for 100 pages while it holds both."""
    block = THREE.block_bytes(PARAMETERS)
    middle = SimStage(memory_bytes=16 * THREE.layer_weight_bytes + 4 * block * 100)
    pipeline = THREE.model_copy(update={"layers": HOME, "stages": (SimStage(), middle, SimStage())})
    return {"pipeline": pipeline, "parameters": PARAMETERS}


async def cancelled(bus: MemoryBus, mesh: SimulatedMesh, layers: tuple[int, ...]) -> ReconfigureReport:
    """A change that is cancelled while it copies."""
    await reconfigure(bus, layers, bytes_per_s=1e5, wait=False)
    await until(lambda: phase_of(mesh) is WorkerPhase.COPYING, "copying")
    await bus.request(
        subjects.RECONFIGURE_CANCEL, ReconfigureCancel(instance_id=NAME), ReconfigureReport, timeout_s=WAIT_S
    )
    assert mesh.coordinator is not None
    coordinator = mesh.coordinator
    await until(lambda: not coordinator.running(), "its end")
    return (await listed(bus)).ended[-1]


def test_capacity_shrinks_and_grows_again_in_one_change() -> None:
    asks = eight()

    async def scenario(mesh: SimulatedMesh) -> None:
        bus, pending = await outsider(mesh), await running(mesh, asks)
        report = await reconfigure(bus, SWAPPED)
        assert report.outcome is ReconfigureOutcome.COMMITTED
        assert report.plan is not None
        assert (report.plan.capacity_during, report.plan.capacity_after) == (1600, 3200)
        assert mesh.workers[NAME].engine.load().capacity == 3200
        await whole(mesh, pending)

    play_reconfigure(scenario, **swapping())


CALLS = (
    "layout",
    "begin_layout",
    "resize_kv",
    "load_weights",
    "start_kv_migration",
    "layout_progress",
    "commit_layout",
    "abort_layout",
)
BEFORE_THE_LOG = ("begin_layout", "resize_kv", "load_weights", "start_kv_migration")


def break_once(mesh: SimulatedMesh, call: str, error: Exception, *, after: bool) -> list[str]:
    """The next call of the engine fails: before it does anything, or afterwards, its answer being lost."""
    engine = mesh.workers[NAME].engine
    right = getattr(engine, call)
    broken: list[str] = []

    async def failing(*args: Any, **kwargs: Any) -> Any:
        if broken:
            return await right(*args, **kwargs)
        broken.append(call)
        if after:
            await right(*args, **kwargs)
        raise error

    setattr(engine, call, failing)
    return broken


ERRORS = [
    (TimeoutError("no answer"), False),
    (TimeoutError("no answer"), True),
    (ConnectionError("gone"), False),
    (LayoutRefused("no", LayoutRefusal.BROKEN), False),
    (RuntimeError("a bug"), False),
    (RuntimeError("a bug"), True),
]
"""And whether it comes when the engine has done what it was asked for."""

BROKEN_CALLS = [
    # Each call breaks in half of the ways; in a soak in all of them.
    pytest.param(
        call,
        error,
        after,
        id=f"{type(error).__name__}-{'after' if after else 'before'}-{call}",
        marks=[pytest.mark.soak] if (number + way) % 2 else [],
    )
    for number, call in enumerate(CALLS)
    for way, (error, after) in enumerate(ERRORS)
]


@pytest.mark.parametrize(("call", "error", "after"), BROKEN_CALLS)
def test_an_engine_that_fails_once_at_any_call(call: str, error: Exception, after: bool) -> None:
    asks = eight()

    async def scenario(mesh: SimulatedMesh) -> None:
        bus, pending = await outsider(mesh), await running(mesh, asks)
        broken = break_once(mesh, call, error, after=after)
        cancels = call == "abort_layout"
        report = await (cancelled(bus, mesh, SWAPPED) if cancels else reconfigure(bus, SWAPPED))
        assert broken == [call]
        if call in BEFORE_THE_LOG:
            assert report.outcome in (ReconfigureOutcome.ABORTED, ReconfigureOutcome.REFUSED)
        split = await split_of_worker(mesh)
        assert split == (SWAPPED if report.outcome is ReconfigureOutcome.COMMITTED else HOME), report
        await whole(mesh, pending)
        again = await reconfigure(bus, (12, 8, 12))
        assert again.outcome is ReconfigureOutcome.COMMITTED, again.reason

    play_reconfigure(scenario, **swapping())


def test_what_breaks_in_the_background_undoes_it() -> None:
    asks = eight()

    async def scenario(mesh: SimulatedMesh) -> None:
        bus, pending = await outsider(mesh), await running(mesh, asks)
        await reconfigure(bus, (20, 12), bytes_per_s=1e6, wait=False)
        await until(lambda: phase_of(mesh) is WorkerPhase.COPYING, "copying")
        mesh.workers[NAME].engine.break_layout("a rank lost its disk")
        assert mesh.coordinator is not None
        coordinator = mesh.coordinator
        await until(lambda: not coordinator.running(), "its end")
        ended = (await listed(bus)).ended[-1]
        assert (ended.outcome, ended.refusal) == (ReconfigureOutcome.ABORTED, LayoutRefusal.BROKEN)
        assert "lost its disk" in ended.reason
        assert await split_of_worker(mesh) == (16, 16)
        await whole(mesh, pending)

    play_reconfigure(scenario)


def phase_of(mesh: SimulatedMesh) -> WorkerPhase | None:
    change = mesh.workers[NAME].core.layouts._change
    return None if change is None else change.phase


SEEN = [phase for phase in WorkerPhase if phase not in (*FINAL, WorkerPhase.ASKING, WorkerPhase.CLOSING)]
"""Closing takes no time where nothing moves; asking has its own test."""


@pytest.mark.parametrize("returns", [True, False], ids=["returns", "stays-away"])
@pytest.mark.parametrize("phase", SEEN)
def test_the_coordinator_dies_in_any_phase(phase: WorkerPhase, returns: bool) -> None:
    """And comes back, and goes on; or doesn't, and the instance goes back by itself."""
    asks = eight()

    async def scenario(mesh: SimulatedMesh) -> None:
        bus, pending = await outsider(mesh), await running(mesh, asks)
        undone = phase in (WorkerPhase.ABORTING, WorkerPhase.RESTORING)
        slow_down(mesh)
        order = cancelled(bus, mesh, SWAPPED) if undone else reconfigure(bus, SWAPPED)
        ordered = asyncio.ensure_future(order)
        await until(lambda: phase_of(mesh) is phase, phase.value, 0.0001)
        ordered.cancel()
        await mesh.kill_coordinator()
        if returns:
            await asyncio.sleep(0.3)
            await mesh.start_coordinator()
        await until(lambda: phase_of(mesh) is None, "its end")
        committed = not undone and (returns or phase in (WorkerPhase.COMMITTING, WorkerPhase.GROWING))
        assert await split_of_worker(mesh) == (SWAPPED if committed else HOME)
        assert mesh.workers[NAME].engine.load().capacity == 3200
        if not returns:
            await mesh.start_coordinator()
        await asyncio.sleep(1.0)
        again = await reconfigure(bus, (12, 8, 12))
        assert again.outcome is ReconfigureOutcome.COMMITTED, again.reason
        await whole(mesh, pending)

    play_reconfigure(scenario, **swapping())


def slow_down(mesh: SimulatedMesh) -> None:
    """Each call of the engine takes a while, so that every phase can be seen."""
    engine = mesh.workers[NAME].engine
    for call in ("begin_layout", "resize_kv", "load_weights", "commit_layout", "abort_layout"):
        right = getattr(engine, call)

        async def slow(*args: Any, _right: Any = right, **kwargs: Any) -> Any:
            await asyncio.sleep(0.02)
            return await _right(*args, **kwargs)

        setattr(engine, call, slow)


@pytest.mark.parametrize("state", [State.BEGINNING, State.CONVERGING, State.COMMITTING, State.ABORTING])
def test_the_instance_dies(state: State) -> None:
    """It comes back in the layout that it is started with; its streams go on."""
    asks = eight()

    async def scenario(mesh: SimulatedMesh) -> None:
        bus, pending = await outsider(mesh), await running(mesh, asks)
        slow_down(mesh)
        undone = state is State.ABORTING
        ordered = asyncio.ensure_future(cancelled(bus, mesh, (20, 12)) if undone else reconfigure(bus, (20, 12)))
        assert mesh.coordinator is not None
        coordinator = mesh.coordinator
        await until(lambda: any(report.phase == state for report in coordinator.running()), state.value)
        await mesh.kill_worker(NAME)
        report = await ordered
        assert report.outcome is ReconfigureOutcome.LOST
        await pending.all_exact()
        assert await split_of_worker(mesh) == (16, 16)
        again = await reconfigure(bus, (20, 12))
        assert again.outcome is ReconfigureOutcome.COMMITTED, again.reason

    play_reconfigure(scenario, worker=WorkerOptions(drain_deadline_s=1.0))


@pytest.mark.parametrize("drop", [0.1, 0.4])
@pytest.mark.parametrize("seed", range(4))
def test_lossy_wires(seed: int, drop: float) -> None:
    print(f"seed {seed}")
    asks = eight()

    async def scenario(mesh: SimulatedMesh) -> None:
        bus, pending = await outsider(mesh), await running(mesh, asks)
        await reconfigure(bus, (20, 12), wait=False)
        mesh.faults.set(drop=drop, duplicate=0.2, delay=0.3, delay_s_max=0.3)
        assert mesh.coordinator is not None
        coordinator = mesh.coordinator
        await until(lambda: not coordinator.running(), "its end")
        mesh.faults.set()
        await until(lambda: phase_of(mesh) is None, "its end")
        await asyncio.sleep(LEASE_S)
        assert await split_of_worker(mesh) in ((16, 16), (20, 12))
        await whole(mesh, pending)

    play_reconfigure(scenario, seed=seed)


# ---- beside moves of requests


def order_of(mesh: SimulatedMesh, request_id: str, destination: Owner, mode: MoveMode = MoveMode.LIVE) -> MoveOrder:
    return MoveOrder(
        owner=mesh.workers[NAME].core.owner, request_id=request_id, destination=destination, mode=mode, deadline_s=30.0
    )


@pytest.mark.parametrize("mode", MoveMode)
def test_requests_move_while_layers_do(mode: MoveMode) -> None:
    asks = eight()

    async def scenario(mesh: SimulatedMesh) -> None:
        bus, pending = await outsider(mesh), streams(mesh, asks)
        core, there = mesh.workers[NAME].core, mesh.workers["worker-1"].core
        await until(lambda: sum(r.end > 2 for r in core.requests) >= 3, "tokens")
        ordered = [asyncio.ensure_future(reconfigure(bus, (20, 12), name)) for name in (NAME, "worker-1")]
        moving = [
            core.moves.begin(order_of(mesh, record.key.request_id, there.owner, mode)) for record in list(core.requests)
        ]
        reports = [await move for move in moving]
        for order in ordered:
            assert (await order).outcome is ReconfigureOutcome.COMMITTED
        assert {str(report.outcome) for report in reports} <= {"moved", "stayed", "refused"}
        assert any(str(report.outcome) == "moved" for report in reports)
        await pending.all_exact()
        await asyncio.sleep(3.0)
        for node in mesh.workers.values():
            assert node.core.moves.under_way() == 0
            assert node.engine.load().used == 0

    play_reconfigure(scenario, instances=2)


def test_a_commit_waits_for_what_is_frozen_and_stops_what_is_not() -> None:
    asks = eight()

    async def scenario(mesh: SimulatedMesh) -> None:
        bus, pending = await outsider(mesh), streams(mesh, asks)
        core, there = mesh.workers[NAME].core, mesh.workers["worker-1"].core
        await until(lambda: sum(r.end > 2 for r in core.requests) >= 3, "tokens")
        gate, moves = core.layouts._gate, []
        ordered = asyncio.ensure_future(reconfigure(bus, (20, 12)))
        await asyncio.sleep(0.17)
        while not ordered.done():
            for record in list(core.requests):
                if core.moves.can_move(record):
                    moves.append(core.moves.begin(order_of(mesh, record.key.request_id, there.owner)))
            if gate.closed:
                assert not any(core.moves.can_move(record) for record in core.requests)
            await asyncio.sleep(0.001)
        report = await ordered
        assert report.outcome is ReconfigureOutcome.COMMITTED, report.reason
        assert report.change is not None
        assert report.change.moves_waited_ns > 0
        await pending.all_exact()
        for move in moves:
            await move

    play_reconfigure(scenario, instances=2)


def test_an_instance_that_leaves_undoes_it() -> None:
    asks = eight()

    async def scenario(mesh: SimulatedMesh) -> None:
        bus, pending = await outsider(mesh), await running(mesh, asks)
        await reconfigure(bus, (20, 12), bytes_per_s=1e6, wait=False)
        core = mesh.workers[NAME].core
        core.drain(30.0)
        await until(lambda: phase_of(mesh) is None, "its end")
        assert mesh.coordinator is not None
        coordinator = mesh.coordinator
        await until(lambda: not coordinator.running(), "its end")
        assert (await listed(bus)).ended[-1].refusal is LayoutRefusal.CANCELLED
        assert core.layouts.epoch == 0
        await pending.all_exact()

    play_reconfigure(scenario)
