"""Moves of requests in a simulated mesh: exact streams, whatever moves, and nothing left behind."""

import asyncio
from dataclasses import replace

import pytest

from meshift.backends.base import EngineRequest
from meshift.backends.sim import SimEngine
from meshift.backends.sim.parameters import SimParameters
from meshift.backends.sim.request import SimRequest
from meshift.backends.sim.work import Emit
from meshift.schemas import subjects
from meshift.schemas.errors import Stale
from meshift.schemas.identity import Owner
from meshift.schemas.instances import DrainReply, DrainRequest, StatusRequest, WorkerStatus
from meshift.schemas.moves import MoveMode, MoveOrder, MoveOutcome, MoveRefusal, MoveReport, MovesReply, MovesRequest
from meshift.services.simulation.chaos_run import check_quiet
from meshift.services.simulation.mesh import SimulatedMesh, WorkerNode
from meshift.services.simulation.serving_run import SWEEP_FRONTEND
from meshift.services.worker.options import WorkerOptions
from tests.support.mesh_kit import eight, expected, play, read, request, settle, streams, tokens_of, undisturbed
from tests.support.move_kit import OneFault, Operator, record_of, running, stream_of, until

SMALL = SimParameters(capacity=640)
"""Two requests of 250 tokens fill it."""


def other(mesh: SimulatedMesh, node: WorkerNode) -> WorkerNode:
    """One that it isn't."""
    return next(each for each in mesh.workers.values() if each is not node)


def phases(node: WorkerNode) -> list[str]:
    """Of the moves out of it."""
    return [move.phase for move in node.core.moves.describe().running]


async def settled(mesh: SimulatedMesh) -> None:
    """Nothing is left."""
    await settle(mesh, check_nothing_left)


async def check_nothing_left(mesh: SimulatedMesh) -> None:
    """Nor is anything remembered."""
    await check_quiet(mesh)
    for name, node in mesh.workers.items():
        assert node.core.moves.running() == node.core.moves.incoming() == 0, name
        assert len(node.core.moves._context.moved) == 0, f"{name} remembers where requests went"


@pytest.mark.parametrize("mode", MoveMode)
def test_a_request_moves(mode: MoveMode) -> None:
    ask = request("m", 60, 120)
    whole = undisturbed(ask)

    async def scenario(mesh: SimulatedMesh) -> None:
        reading = streams(mesh, [ask])
        operator = await Operator.join(mesh)
        node, _ = await running(mesh, "m", 5)
        report = await operator.moved(node, "m", mode=mode)
        found = record_of(mesh, "m")
        assert found is not None
        assert found[0].core.owner == report.destination != node.core.owner
        assert (report.attempt, report.hop, report.mode) == (1, 1, mode)
        assert tokens_of(await reading.tasks[0]) == whole
        counters = mesh.frontends["frontend-0"].counters
        assert (counters.resumes, counters.stale_events) == (0, 0)
        figures = report.figures
        assert figures.rounds == {MoveMode.LIVE: 2, MoveMode.BLOCKING: 1, MoveMode.RECOMPUTE: 0}[mode]
        assert (figures.tokens > 60) == (figures.byte_count > 0) == (mode is not MoveMode.RECOMPUTE)
        assert figures.duration_ns > figures.frozen_ns
        assert (figures.frozen_ns > 0) == (mode is not MoveMode.RECOMPUTE)
        await settled(mesh)

    play(scenario)


@pytest.mark.parametrize("emit", ["step", "edges"])
def test_one_whose_tokens_come_faster_than_it_is_copied_finds_room(emit: Emit) -> None:
    """Also where the listener hears of them at its end only, as in the fast simulation."""
    ask = request("m", 3000, 300)
    whole = undisturbed(ask)

    async def scenario(mesh: SimulatedMesh) -> None:
        reading = streams(mesh, [ask])
        operator = await Operator.join(mesh)
        await asyncio.sleep(3.0)
        found = record_of(mesh, "m")
        assert found is not None
        report = await operator.moved(found[0], "m")
        assert (report.attempt, report.figures.rounds) == (1, 3)
        assert report.figures.tokens > 3060, "far more came than the headroom of the first round"
        assert tokens_of(await reading.tasks[0]) == whole
        await settled(mesh)

    # As slow as a link that copies a thousand tokens a second.
    parameters = SimParameters(copy_token_ns=1_000_000)
    play(scenario, parameters=parameters, skip_steps=emit == "edges", emit=emit, frontend=SWEEP_FRONTEND)


def test_it_moves_on_and_comes_back() -> None:
    ask = request("m", 60, 200)
    whole = undisturbed(ask)

    async def scenario(mesh: SimulatedMesh) -> None:
        reading = streams(mesh, [ask])
        operator = await Operator.join(mesh)
        places = []
        for hop, mode in enumerate([MoveMode.LIVE, MoveMode.RECOMPUTE, MoveMode.LIVE, MoveMode.BLOCKING], start=1):
            node, record = await running(mesh, "m", 20 * hop)
            places.append(node.core.owner.instance_id)
            assert record.key.hop == hop - 1
            assert record.base == 0, "the new owner can be asked for everything"
            destination = mesh.workers[{0: "worker-1", 1: "worker-2", 2: "worker-0"}[int(places[-1][-1])]]
            await operator.moved(node, "m", destination=destination, mode=mode)
        assert tokens_of(await reading.tasks[0]) == whole
        assert len(set(places)) == 3
        await settled(mesh)

    play(scenario, instances=3)


@pytest.mark.parametrize("mode", MoveMode)
def test_a_schema_goes_ahead_of_its_request(mode: MoveMode, monkeypatch: pytest.MonkeyPatch) -> None:
    """The destination learns it before the first reservation, and once: a move that finds it compiled doesn't wait for
    it with the request stopped."""
    plain, schema = request("m", 60, 120), '{"type": "object"}'
    ask = replace(plain, sampling=plain.sampling.model_copy(update={"json_schema": schema}))
    whole, build = undisturbed(plain), SimEngine._build
    learned: list[tuple[SimEngine, str, int]] = []

    def without_schema(self: SimEngine, request: EngineRequest) -> SimRequest:
        bare = request.sampling.model_copy(update={"json_schema": None})
        return build(self, replace(request, sampling=bare))

    async def learn(self: SimEngine, json_schema: str) -> None:
        learned.append((self, json_schema, self.load().reserved))
        await asyncio.sleep(0.3)

    monkeypatch.setattr(SimEngine, "_build", without_schema)
    monkeypatch.setattr(SimEngine, "learn_schema", learn)

    async def scenario(mesh: SimulatedMesh) -> None:
        reading = streams(mesh, [ask])
        operator = await Operator.join(mesh)
        node, _ = await running(mesh, "m", 5)
        report = await operator.moved(node, "m", mode=mode)
        assert learned == [(other(mesh, node).core._engine, schema, 0)]
        assert report.figures.frozen_ns < 0.2e9
        assert tokens_of(await reading.tasks[0]) == whole
        await settled(mesh)

    play(scenario)


def test_log_probabilities_move_too() -> None:
    asks = eight()
    asks = [ask for ask in asks if ask.sampling.logprobs is None][:1]
    ask = asks[0]
    with_logprobs = request("l", 60, 100)
    with_logprobs = type(with_logprobs)(
        "l", ask.model, with_logprobs.prompt, with_logprobs.sampling.model_copy(update={"logprobs": 3})
    )
    whole: list[object] = []

    async def plain(mesh: SimulatedMesh) -> None:
        whole.extend(
            [
                value
                for chunk in await read(mesh.frontends["frontend-0"], with_logprobs)
                for value in chunk.logprobs or ()
            ]
        )

    async def scenario(mesh: SimulatedMesh) -> None:
        reading = streams(mesh, [with_logprobs])
        operator = await Operator.join(mesh)
        node, _ = await running(mesh, "l", 10)
        await operator.moved(node, "l")
        # What is lost of the old owner's and the new one's tokens is asked for, log-probabilities too.
        chunks = await reading.tasks[0]
        assert [value for chunk in chunks for value in chunk.logprobs or ()] == whole
        assert len(whole) == 100
        await settled(mesh)

    play(plain)
    play(scenario)


def test_a_waiting_request_moves_as_state() -> None:
    fillers = [request(f"f{index}", 500, 100) for index in range(2)]
    ask = request("w", 300, 50)
    whole = undisturbed(ask)

    async def scenario(mesh: SimulatedMesh) -> None:
        reading = streams(mesh, fillers)
        for index in range(2):
            await running(mesh, f"f{index}")
        waiting = streams(mesh, [ask])
        await until(lambda: record_of(mesh, "w") is not None, "the waiting request")
        found = record_of(mesh, "w")
        assert found is not None
        node = found[0]
        assert node.engine.load().waiting == 1
        operator = await Operator.join(mesh)
        # The other one is full as well: there it waits on.
        report = await operator.moved(node, "w")
        assert report.mode is MoveMode.RECOMPUTE
        assert (node.engine.load().waiting, other(mesh, node).engine.load().waiting) == (0, 1)
        assert tokens_of(await waiting.tasks[0]) == whole
        for task in reading.tasks:
            await task
        await settled(mesh)

    play(scenario, parameters=SMALL)


def test_many_at_once_in_both_directions() -> None:
    asks = eight()

    async def scenario(mesh: SimulatedMesh) -> None:
        reading = streams(mesh, asks)
        operator = await Operator.join(mesh)
        orders = []
        for ask in asks:
            node, _ = await running(mesh, ask.request_id, 2)
            orders.append(operator.moved(node, ask.request_id))
        reports = await asyncio.gather(*orders)
        assert {report.source.instance_id for report in reports} == set(mesh.workers)
        await reading.all_exact()
        assert mesh.frontends["frontend-0"].counters.resumes == 0
        await settled(mesh)

    play(scenario)


def test_no_more_at_once_than_allowed() -> None:
    asks = eight()

    async def scenario(mesh: SimulatedMesh) -> None:
        reading = streams(mesh, asks)
        operator = await Operator.join(mesh)
        for ask in asks:
            await running(mesh, ask.request_id, 2)
        found = [record_of(mesh, ask.request_id) for ask in asks]
        reports = await asyncio.gather(*(operator.move(each[0], each[1].key.request_id) for each in found if each))
        refused = [report for report in reports if report.outcome is not MoveOutcome.MOVED]
        assert len(refused) == 8 - 2
        assert {report.refusal for report in refused} == {MoveRefusal.BUSY}
        await reading.all_exact()
        await settled(mesh)

    play(scenario, worker=WorkerOptions(moves_out_max=1))


def test_no_more_in_at_once_than_allowed() -> None:
    asks = eight()

    async def scenario(mesh: SimulatedMesh) -> None:
        reading = streams(mesh, asks)
        operator = await Operator.join(mesh)
        for ask in asks:
            await running(mesh, ask.request_id, 2)
        found = [record_of(mesh, ask.request_id) for ask in asks]
        reports = await asyncio.gather(*(operator.move(each[0], each[1].key.request_id) for each in found if each))
        refused = [report for report in reports if report.outcome is not MoveOutcome.MOVED]
        assert {(report.outcome, report.refusal) for report in refused} == {(MoveOutcome.STAYED, MoveRefusal.BUSY)}
        assert len(refused) == 8 - 2
        await reading.all_exact()
        await settled(mesh)

    play(scenario, worker=WorkerOptions(moves_in_max=1))


# ---- refusals


def test_what_can_not_be_ordered() -> None:
    ask = request("m", 60, 100)

    async def scenario(mesh: SimulatedMesh) -> None:
        reading = streams(mesh, [ask])
        operator = await Operator.join(mesh)
        node, record = await running(mesh, "m", 3)
        nobody = await operator.move(node, "nobody")
        assert (nobody.outcome, nobody.refusal) == (MoveOutcome.REFUSED, MoveRefusal.UNKNOWN)
        here = await operator.move(node, "m", node)
        assert (here.outcome, here.refusal) == (MoveOutcome.REFUSED, MoveRefusal.INCOMPATIBLE)
        first = asyncio.ensure_future(operator.move(node, "m"))
        await until(lambda: record.moving, "a move")
        twice = await operator.move(node, "m")
        assert (twice.outcome, twice.refusal) == (MoveOutcome.REFUSED, MoveRefusal.BUSY)
        assert (await first).outcome is MoveOutcome.MOVED
        gone = await operator.move(node, "m")
        assert gone.refusal is MoveRefusal.UNKNOWN
        stranger = Owner(node.core.owner.instance_id, 99)
        order = MoveOrder(owner=stranger, request_id="m")
        with pytest.raises(Stale):
            await operator.bus.request(subjects.worker_move(stranger.instance_id), order, MoveReport, timeout_s=1.0)
        await reading.tasks[0]
        await settled(mesh)

    play(scenario)


def test_no_destination() -> None:
    ask = request("m", 60, 100)
    whole = undisturbed(ask)

    async def scenario(mesh: SimulatedMesh) -> None:
        reading = streams(mesh, [ask])
        operator = await Operator.join(mesh)
        node, _ = await running(mesh, "m", 3)
        for scheduler in (True, False):
            if not scheduler:
                await mesh.kill_scheduler()
            report = await operator.move(node, "m")
            assert (report.outcome, report.refusal) == (MoveOutcome.REFUSED, MoveRefusal.NO_DESTINATION)
        assert tokens_of(await reading.tasks[0]) == whole

    play(scenario, instances=1)


def test_without_a_scheduler_the_roomiest_takes_it() -> None:
    asks = [request(f"b{index}", 100 * (index + 1), 300) for index in range(4)]
    whole = undisturbed(asks[0])

    async def scenario(mesh: SimulatedMesh) -> None:
        reading = streams(mesh, asks)
        operator = await Operator.join(mesh)
        for ask in asks:
            await running(mesh, ask.request_id, 3)
        await mesh.kill_scheduler()
        node, _ = await running(mesh, "b0")
        free = {each.core.owner: each.engine.load().free for each in mesh.workers.values() if each is not node}
        assert len(set(free.values())) > 1
        report = await operator.moved(node, "b0")
        assert report.destination is not None
        assert free[report.destination] == max(free.values())
        assert tokens_of(await reading.tasks[0]) == whole
        for task in reading.tasks:
            await task

    play(scenario, instances=4)


@pytest.mark.parametrize("mode", [MoveMode.LIVE, MoveMode.RECOMPUTE])
def test_no_room_there(mode: MoveMode) -> None:
    asks = [request("m", 300, 200), request("f", 550, 60)]
    whole = undisturbed(asks[0])

    async def scenario(mesh: SimulatedMesh) -> None:
        reading = streams(mesh, asks)
        operator = await Operator.join(mesh)
        node, _ = await running(mesh, "m", 3)
        await running(mesh, "f", 3)
        report = await operator.move(node, "m", mode=mode)
        if mode is MoveMode.LIVE:
            assert (report.outcome, report.refusal) == (MoveOutcome.STAYED, MoveRefusal.NO_ROOM)
        else:
            assert report.outcome is MoveOutcome.MOVED
        assert tokens_of(await reading.tasks[0]) == whole
        # Nothing was reserved there: it may go there later, under the same name.
        await reading.tasks[1]
        await settled(mesh)

    play(scenario, parameters=SMALL)


def test_an_incompatible_instance_takes_nothing() -> None:
    ask = request("m", 60, 100)
    whole = undisturbed(ask)

    async def scenario(mesh: SimulatedMesh) -> None:
        reading = streams(mesh, [ask])
        operator = await Operator.join(mesh)
        node, _ = await running(mesh, "m", 3)
        there = other(mesh, node)
        moves_in = there.engine._parts.moves_in if there.engine._parts is not None else None
        assert moves_in is not None
        moves_in._layout = replace(moves_in._layout, weights="others")
        for mode in MoveMode:
            report = await operator.move(node, "m", there, mode=mode)
            assert (report.outcome, report.refusal) == (MoveOutcome.STAYED, MoveRefusal.INCOMPATIBLE)
            assert "different weights" in report.reason
        assert tokens_of(await reading.tasks[0]) == whole
        await settled(mesh)

    play(scenario)


def test_a_deadline_ends_a_move_before_its_commit() -> None:
    ask = request("m", 300, 100)
    whole = undisturbed(ask)

    async def scenario(mesh: SimulatedMesh) -> None:
        reading = streams(mesh, [ask])
        operator = await Operator.join(mesh)
        node, _ = await running(mesh, "m", 3)
        report = await operator.move(node, "m", deadline_s=0.02)
        assert (report.outcome, report.refusal) == (MoveOutcome.STAYED, MoveRefusal.DEADLINE)
        assert report.phase == "stayed"
        # To the same destination again: it gets a new attempt first, since that one refuses the old name for ever.
        again = await operator.moved(node, "m")
        assert again.destination == report.destination
        assert (again.attempt, again.hop) == (2, 1)
        assert tokens_of(await reading.tasks[0]) == whole
        assert mesh.frontends["frontend-0"].counters.resumes == 0
        await settled(mesh)

    play(scenario)


def test_a_slow_copy_keeps_its_reservation() -> None:
    ask = request("m", 600, 400)
    whole = undisturbed(ask)

    async def scenario(mesh: SimulatedMesh) -> None:
        reading = streams(mesh, [ask])
        operator = await Operator.join(mesh)
        node, _ = await running(mesh, "m", 3)
        # 0.2 s of copying with reservations of 0.05 s: they are renewed meanwhile.
        await operator.moved(node, "m")
        assert tokens_of(await reading.tasks[0]) == whole
        await settled(mesh)

    play(scenario, worker=WorkerOptions(reservation_s=0.05))


@pytest.mark.parametrize("deadline_s", [1e-17, 0.0003])
def test_a_deadline_before_anything_began(deadline_s: float) -> None:
    ask = request("m", 60, 100)
    whole = undisturbed(ask)

    async def scenario(mesh: SimulatedMesh) -> None:
        reading = streams(mesh, [ask])
        node, _ = await running(mesh, "m", 3)
        order = MoveOrder(owner=node.core.owner, request_id="m", deadline_s=deadline_s)
        beginning = node.core.moves.begin(order)
        await asyncio.sleep(deadline_s)
        report = await beginning
        # The scheduler takes 0.4 ms to say where to.
        outcome = MoveOutcome.REFUSED if deadline_s < 0.0001 else MoveOutcome.STAYED
        assert (report.outcome, report.refusal) == (outcome, MoveRefusal.DEADLINE)
        assert tokens_of(await reading.tasks[0]) == whole
        await settled(mesh)

    play(scenario)


def test_a_request_that_ends_in_the_instant_of_its_order() -> None:
    ask = request("m", 60, 100)
    whole = undisturbed(ask)

    async def scenario(mesh: SimulatedMesh) -> None:
        reading = streams(mesh, [ask])
        node, record = await running(mesh, "m", 3)
        beginning = node.core.moves.begin(MoveOrder(owner=node.core.owner, request_id="m"))
        node.core._close(record.key)
        report = await beginning
        assert (report.outcome, report.refusal, report.phase) == (MoveOutcome.ENDED, MoveRefusal.ENDED, "ended")
        assert tokens_of(await reading.tasks[0]) == whole
        await settled(mesh)

    play(scenario)


# ---- cancels and losses


def test_a_cancel_follows_the_request() -> None:
    ask = request("m", 60, 1_000)

    async def scenario(mesh: SimulatedMesh) -> None:
        frontend = mesh.frontends["frontend-0"]
        handle = await frontend.generate(ask)
        operator = await Operator.join(mesh)
        node, _ = await running(mesh, "m", 3)
        # The new owner is not heard: its frontend cancels the old one.
        there = other(mesh, node)
        mesh.faults.partition([there.core.owner.instance_id], ["frontend-0"], one_way=True)
        await operator.moved(node, "m", destination=there)
        assert stream_of(frontend, "m").owner == node.core.owner
        await handle.cancel()
        await asyncio.sleep(0.5)
        assert record_of(mesh, "m") is None
        assert there.engine.load().used == 0
        mesh.faults.heal()
        await settled(mesh)

    play(scenario)


def test_a_lost_announcement_is_made_good_by_the_old_owner() -> None:
    ask = request("m", 60, 300)
    whole = undisturbed(ask)

    async def scenario(mesh: SimulatedMesh) -> None:
        reading = streams(mesh, [ask])
        frontend = mesh.frontends["frontend-0"]
        operator = await Operator.join(mesh)
        node, _ = await running(mesh, "m", 3)
        there = other(mesh, node)
        cut = mesh.faults.partition([there.core.owner.instance_id], ["frontend-0"], one_way=True)
        await operator.moved(node, "m", destination=there)
        await until(lambda: stream_of(frontend, "m").owner == there.core.owner, "the old owner's word")
        mesh.faults.heal(cut)
        assert tokens_of(await reading.tasks[0]) == whole
        assert frontend.counters.resumes == 0
        await settled(mesh)

    play(scenario)


def test_the_old_owners_last_tokens_may_come_late() -> None:
    ask = request("m", 60, 200)
    whole = undisturbed(ask)

    async def scenario(mesh: SimulatedMesh) -> None:
        reading = streams(mesh, [ask])
        frontend = mesh.frontends["frontend-0"]
        operator = await Operator.join(mesh)
        node, _ = await running(mesh, "m", 3)
        name = node.core.owner.instance_id
        mesh.faults.set(
            delay=1.0, delay_s_max=0.3, link=lambda sender, _, subject: sender == name and ".tokens" in subject
        )
        await operator.moved(node, "m")
        await asyncio.sleep(0.5)
        mesh.faults.set()
        assert tokens_of(await reading.tasks[0]) == whole
        assert (frontend.counters.resumes, frontend.counters.stale_events) == (0, 0)
        await settled(mesh)

    play(scenario)


def test_a_gap_is_asked_of_the_old_owner_and_then_of_the_new_one() -> None:
    ask = request("m", 60, 200)
    whole = undisturbed(ask)

    async def scenario(mesh: SimulatedMesh) -> None:
        reading = streams(mesh, [ask])
        frontend = mesh.frontends["frontend-0"]
        operator = await Operator.join(mesh)
        for hop in range(2):
            node, _ = await running(mesh, "m", 30 + 60 * hop)
            name = node.core.owner.instance_id
            cut = mesh.faults.partition([name], ["frontend-0"], one_way=True)
            await asyncio.sleep(0.2)
            if hop == 0:
                # It answers no more questions either: the new one has everything.
                await operator.moved(node, "m")
                await asyncio.sleep(1.5)
                mesh.faults.heal(cut)
            else:
                mesh.faults.heal(cut)
                await operator.moved(node, "m")
        assert tokens_of(await reading.tasks[0]) == whole
        assert frontend.counters.resumes == 0
        await settled(mesh)

    play(scenario)


def test_a_lost_answer_is_asked_for() -> None:
    ask = request("m", 60, 300)
    whole = undisturbed(ask)

    async def scenario(mesh: SimulatedMesh) -> None:
        reading = streams(mesh, [ask])
        operator = await Operator.join(mesh)
        node, _ = await running(mesh, "m", 3)
        fault = OneFault(mesh, "drop", skip=1, subjects=(".move-commit",))
        fault.arm()
        report = await operator.moved(node, "m")
        assert fault.hits, "nothing was lost"
        assert report.reason == ""
        assert tokens_of(await reading.tasks[0]) == whole
        await settled(mesh)

    play(scenario)


def test_a_lost_commit_is_aborted_by_asking() -> None:
    ask = request("m", 60, 300)
    whole = undisturbed(ask)

    async def scenario(mesh: SimulatedMesh) -> None:
        reading = streams(mesh, [ask])
        operator = await Operator.join(mesh)
        node, _ = await running(mesh, "m", 3)
        fault = OneFault(mesh, "drop", subjects=(".move-commit",))
        fault.arm()
        report = await operator.move(node, "m")
        assert fault.hits
        assert (report.outcome, report.refusal) == (MoveOutcome.STAYED, MoveRefusal.UNREACHABLE)
        assert tokens_of(await reading.tasks[0]) == whole
        await settled(mesh)

    play(scenario)


@pytest.mark.parametrize("heard", [True, False])
def test_who_owns_it_is_the_frontends_to_say(heard: bool) -> None:
    ask = request("m", 60, 400)
    whole = undisturbed(ask)

    async def scenario(mesh: SimulatedMesh) -> None:
        reading = streams(mesh, [ask])
        frontend = mesh.frontends["frontend-0"]
        operator = await Operator.join(mesh)
        node, record = await running(mesh, "m", 3)
        there = other(mesh, node)
        name = there.core.owner.instance_id
        moving = asyncio.ensure_future(operator.move(node, "m", there))
        await until(lambda: phases(node) == ["committing"], "the commit", 0.0001)
        # The commit arrives, its answer doesn't; nor does the answer to the question.
        mesh.faults.partition([name], [node.core.owner.instance_id], one_way=True)
        if not heard:
            mesh.faults.partition([name], ["frontend-0"])
        await until(lambda: phases(node) == ["fencing"], "the question to the frontend", 0.001)
        assert there.core.moves.counters.arrived == {"committed": 1}
        report = await moving
        assert report.outcome is (MoveOutcome.MOVED if heard else MoveOutcome.STAYED)
        await asyncio.sleep(1.0)
        mesh.faults.heal()
        stream = stream_of(frontend, "m")
        assert (stream.attempt, stream.hop) == ((1, 1) if heard else (2, 0))
        assert record.key.attempt == (1 if heard else 2)
        assert tokens_of(await reading.tasks[0]) == whole
        assert frontend.counters.resumes == 0
        await settled(mesh)

    play(scenario)


def test_with_nobody_to_say_it_ends_with_its_lease() -> None:
    ask = request("m", 60, 400)
    whole = undisturbed(ask)

    async def scenario(mesh: SimulatedMesh) -> None:
        reading = streams(mesh, [ask])
        operator = await Operator.join(mesh)
        node, _ = await running(mesh, "m", 3)
        there = other(mesh, node)
        moving = asyncio.ensure_future(operator.move(node, "m", there))
        await until(lambda: phases(node) == ["committing"], "the commit", 0.0001)
        # Cut off from everybody but the operator: it may neither go on nor forget.
        mesh.faults.partition([node.core.owner.instance_id], [there.core.owner.instance_id, "frontend-0"])
        report = await moving
        assert (report.outcome, report.refusal) == (MoveOutcome.ENDED, MoveRefusal.ENDED)
        mesh.faults.heal()
        assert tokens_of(await reading.tasks[0]) == whole
        await settled(mesh)

    play(scenario)


# ---- what operators see


def test_moves_are_listed() -> None:
    ask = request("m", 300, 100)

    async def scenario(mesh: SimulatedMesh) -> None:
        reading = streams(mesh, [ask])
        operator = await Operator.join(mesh)
        node, record = await running(mesh, "m", 3)

        async def listed(which: WorkerNode) -> MovesReply:
            subject = subjects.worker_moves(which.core.owner.instance_id)
            return await operator.bus.request(subject, MovesRequest(), MovesReply, timeout_s=1.0)

        assert (await listed(node)).running == ()
        moving = asyncio.ensure_future(operator.move(node, "m"))
        await until(lambda: record.moving, "a move")
        await asyncio.sleep(0.02)
        (under_way,) = (await listed(node)).running
        assert (under_way.request_id, under_way.phase, under_way.outcome) == ("m", "copying", None)
        assert (await listed(other(mesh, node))).incoming == 1
        report = await moving
        after = await listed(node)
        assert (after.running, after.ended) == ((), (report,))
        counters = node.core.moves.counters
        assert counters.ended == {("live", "moved", "none"): 1}
        assert counters.frozen.count == counters.durations.count == 1
        assert other(mesh, node).core.moves.counters.arrived == {"committed": 1}
        await reading.tasks[0]
        await settled(mesh)

    play(scenario)


# ---- drains


async def drain(operator: Operator, node: WorkerNode, deadline_s: float) -> None:
    """Begin it, as an operator does."""
    subject = subjects.worker_drain(node.core.owner.instance_id)
    await operator.bus.request(subject, DrainRequest(deadline_s=deadline_s), DrainReply, timeout_s=1.0)


async def status(operator: Operator, node: WorkerNode) -> WorkerStatus:
    subject = subjects.worker_status(node.core.owner.instance_id)
    return await operator.bus.request(subject, StatusRequest(), WorkerStatus, timeout_s=1.0)


@pytest.mark.parametrize("scheduler", [True, False])
def test_a_drain_moves_everything_away(scheduler: bool) -> None:
    asks = eight()

    async def scenario(mesh: SimulatedMesh) -> None:
        reading = streams(mesh, asks)
        operator = await Operator.join(mesh)
        for ask in asks:
            await running(mesh, ask.request_id, 2)
        if not scheduler:
            await mesh.kill_scheduler()
        node = mesh.workers["worker-0"]
        left = sum(not record.over for record in node.core.requests)
        assert left > 1
        began_s = asyncio.get_running_loop().time()
        await drain(operator, node, 60.0)
        shown = await status(operator, node)
        assert shown.drain is not None
        assert shown.drain.left + shown.drain.moved == left
        await node.core.ended
        took_s = asyncio.get_running_loop().time() - began_s
        assert took_s < 2.0, "their outputs take longer than that"
        assert node.core.moves.draining.status(0, 0.0).moved == left
        await reading.all_exact()
        assert mesh.frontends["frontend-0"].counters.resumes == 0
        assert all(handle.attempt == 1 for handle in mesh.frontends["frontend-0"]._streams.values())
        if not scheduler:
            await mesh.start_scheduler()
        await settled(mesh)

    play(scenario)


def test_a_drain_without_room_elsewhere_lets_requests_wait_there() -> None:
    asks = [request("m", 300, 200), request("f", 550, 60)]
    whole = undisturbed(asks[0])

    async def scenario(mesh: SimulatedMesh) -> None:
        reading = streams(mesh, asks)
        operator = await Operator.join(mesh)
        node, _ = await running(mesh, "m", 3)
        await running(mesh, "f", 3)
        await drain(operator, node, 60.0)
        await node.core.ended
        assert record_of(mesh, "m") is not None
        assert tokens_of(await reading.tasks[0]) == whole
        assert mesh.frontends["frontend-0"].counters.resumes == 0
        await settled(mesh)

    play(scenario, parameters=SMALL)


def test_a_drain_with_nowhere_to_go_says_so_and_waits() -> None:
    ask = request("m", 60, 200)
    whole = undisturbed(ask)

    async def scenario(mesh: SimulatedMesh) -> None:
        reading = streams(mesh, [ask])
        operator = await Operator.join(mesh)
        node, _ = await running(mesh, "m", 3)
        await drain(operator, node, 60.0)
        await asyncio.sleep(2.0)
        shown = await status(operator, node)
        assert shown.drain is not None
        assert (shown.drain.left, shown.drain.moved) == (1, 0)
        assert "no_destination" in shown.drain.blocked
        assert tokens_of(await reading.tasks[0]) == whole
        assert mesh.frontends["frontend-0"].counters.resumes == 0
        await node.core.ended

    play(scenario, instances=1)


def test_two_instances_that_drain_at_once_leave_their_requests_to_a_third() -> None:
    asks = eight()

    async def scenario(mesh: SimulatedMesh) -> None:
        reading = streams(mesh, asks)
        operator = await Operator.join(mesh)
        for ask in asks:
            await running(mesh, ask.request_id, 2)
        nodes = [mesh.workers["worker-0"], mesh.workers["worker-1"]]
        for node in nodes:
            await drain(operator, node, 60.0)
        for node in nodes:
            await node.core.ended
        await reading.all_exact()
        assert mesh.frontends["frontend-0"].counters.resumes == 0
        await settled(mesh)

    play(scenario, instances=3)


def test_a_rolling_restart_disturbs_no_stream() -> None:
    asks = [request(f"long{index}", 50, 1_200) for index in range(6)]
    wholes = [undisturbed(ask) for ask in asks]

    async def scenario(mesh: SimulatedMesh) -> None:
        reading = streams(mesh, asks)
        operator = await Operator.join(mesh)
        for ask in asks:
            await running(mesh, ask.request_id, 2)
        for name in mesh.worker_names:
            node = mesh.workers[name]
            await drain(operator, node, 300.0)
            await node.core.ended
            await until(lambda name=name, node=node: mesh.workers[name] is not node, f"a new {name}")  # type: ignore[misc]
            await asyncio.sleep(1.0)
        frontend = mesh.frontends["frontend-0"]
        streams_open = list(frontend._streams.values())
        assert streams_open, "they ended before the restarts did"
        assert all(stream.attempt == 1 for stream in streams_open)
        for whole, task in zip(wholes, reading.tasks, strict=True):
            assert tokens_of(await task) == whole
        assert frontend.counters.resumes == 0
        await settled(mesh)

    play(scenario, instances=3)


def test_expected_is_what_an_undisturbed_engine_gives() -> None:
    (ask, *_) = eight()
    assert expected(ask) == undisturbed(ask)
