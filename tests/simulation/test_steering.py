"""Policy and decisions, asked of a frontend in a simulated mesh."""

import asyncio

import pytest
from pydantic import JsonValue

from meshift.schemas import subjects
from meshift.schemas.admin import DrainBody
from meshift.schemas.errors import InvalidRequest, NotFound, Unavailable
from meshift.schemas.instances import PolicyStamp
from meshift.schemas.moves import MoveOrder, MoveOutcome
from meshift.schemas.steering import DecisionsRequest, DecisionSubject, KeptPolicy
from meshift.services.simulation.mesh import SimulatedMesh
from tests.support.mesh_kit import eight, outsider, play, read, request, streams

CHANGE: dict[str, JsonValue] = {"migration": {"out_below": 5, "in_above": 90}}
REPORTS_S = 2.0
"""Some report intervals of the scheduler."""


async def restart_scheduler(mesh: SimulatedMesh) -> None:
    await mesh.kill_scheduler()
    await mesh.start_scheduler()


def out_below(mesh: SimulatedMesh) -> float:
    assert mesh.scheduler is not None
    return mesh.scheduler.settings.out_below


def test_a_change_through_a_frontend_is_in_force_at_once() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        steering = mesh.frontends["frontend-0"].steering
        reply = await steering.change_policy(CHANGE)
        assert (reply.changes, out_below(mesh)) == (CHANGE, 5)
        assert (await steering.policy()).settings == reply.settings
        with pytest.raises(InvalidRequest) as caught:
            await steering.change_policy({"migration": {"out_below": 95}})
        assert "must be below in_above" in str(caught.value)
        with pytest.raises(InvalidRequest) as caught:
            await steering.change_policy({"migration": {"out_below": float("inf")}})
        assert caught.value.param == "migration.out_below"
        assert out_below(mesh) == 5

    play(scenario)


def test_a_change_outlives_the_scheduler_by_any_frontend() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        await mesh.frontends["frontend-0"].steering.change_policy(CHANGE)
        await asyncio.sleep(REPORTS_S)
        await mesh.kill_frontend("frontend-0")
        await restart_scheduler(mesh)
        assert out_below(mesh) == 10
        await asyncio.sleep(REPORTS_S)
        assert out_below(mesh) == 5, "frontend-1, which was not asked, had it too"

    play(scenario, frontends=2)


def test_a_change_at_once_after_a_restart_comes_on_top_of_the_kept_ones() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        steering = mesh.frontends["frontend-0"].steering
        await steering.change_policy(CHANGE)
        await restart_scheduler(mesh)
        reply = await steering.change_policy({"policy": "llumnix"})
        assert reply.changes == CHANGE | {"policy": "llumnix"}
        await asyncio.sleep(REPORTS_S)
        assert out_below(mesh) == 5
        assert (await steering.policy()).stamp == reply.stamp

    play(scenario)


def test_a_change_is_forgotten_with_the_scheduler_and_the_last_frontend() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        await mesh.frontends["frontend-0"].steering.change_policy(CHANGE)
        await mesh.kill_frontend("frontend-0")
        await restart_scheduler(mesh)
        await mesh.start_frontend("frontend-0")
        await asyncio.sleep(REPORTS_S)
        assert out_below(mesh) == 10

    play(scenario)


def test_what_is_older_is_not_taken() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        await mesh.frontends["frontend-0"].steering.change_policy(CHANGE)
        bus = await outsider(mesh)
        bus.publish(subjects.POLICY_KEPT, KeptPolicy(stamp=PolicyStamp(0, 9), changes={"policy": "llumnix"}))
        await asyncio.sleep(REPORTS_S)
        assert out_below(mesh) == 5

    play(scenario)


def test_without_a_scheduler_it_is_said() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        await mesh.kill_scheduler()
        steering = mesh.frontends["frontend-0"].steering
        with pytest.raises(Unavailable, match="no scheduler"):
            await steering.policy()
        with pytest.raises(Unavailable, match="no scheduler"):
            await steering.decisions(DecisionsRequest())
        explanation = await steering.explain("r")
        assert explanation.unanswered == ("scheduler",)

    play(scenario)


def test_a_request_is_explained_from_its_dispatch_to_its_moves() -> None:
    asks = eight()

    async def scenario(mesh: SimulatedMesh) -> None:
        pending = streams(mesh, asks)
        await asyncio.sleep(0.5)
        steering = mesh.frontends["frontend-0"].steering
        node = next(node for node in mesh.workers.values() if any(not record.over for record in node.core.requests))
        request_id = next(record.key.request_id for record in node.core.requests if not record.over)
        report = await node.core.moves.begin(MoveOrder(owner=node.core.owner, request_id=request_id))
        assert report.outcome is MoveOutcome.MOVED
        await asyncio.sleep(0.1)
        explanation = await steering.explain(request_id)
        dispatch, elsewhere = explanation.dispatches
        assert (dispatch.decision, dispatch.attempt) == (str(node.core.owner), 1)
        assert elsewhere.decision == str(report.destination), "a move without a destination asks for one"
        assert {item.name for item in dispatch.alternatives} == {str(n.core.owner) for n in mesh.workers.values()}
        (move,) = explanation.moves
        assert (move.source, move.destination) == (report.source, report.destination)
        assert explanation.owner == str(report.destination)
        assert explanation.unanswered == ()
        with pytest.raises(NotFound, match="nothing is known"):
            await steering.explain("never")
        await pending.all_exact()

    play(scenario)


def test_a_policys_move_is_explained_by_its_pair() -> None:
    """One instance is full, another empty: the scheduler pairs them, and a request moves."""

    async def scenario(mesh: SimulatedMesh) -> None:
        frontend = mesh.frontends["frontend-0"]
        await frontend.steering.change_policy({"migration": {"out_below": 1e6, "in_above": 1e9}})
        reads = [asyncio.ensure_future(read(frontend, request(f"r{index}", 200, 300))) for index in range(6)]
        await asyncio.sleep(1.0)
        await frontend.operators.drain("worker-0", DrainBody(deadline_s=60.0))
        await asyncio.sleep(3.0)
        decided = await frontend.steering.decisions(DecisionsRequest(subject=DecisionSubject.PAIR))
        looks = [item for item in decided.current if item.subject is DecisionSubject.PAIR]
        assert len(looks) == 1
        assert "sources below 1e+06" in looks[0].why
        for task in reads:
            await task

    play(scenario)


def test_a_held_dispatch_is_remembered_once() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        frontend = mesh.frontends["frontend-0"]
        reads = [asyncio.ensure_future(read(frontend, request(f"r{index}", 5000, 200))) for index in range(8)]
        await asyncio.sleep(4.0)
        decided = await frontend.steering.decisions(DecisionsRequest(subject=DecisionSubject.DISPATCH, limit=256))
        waits = [item.request_id for item in decided.decisions if item.decision == "wait"]
        assert waits, "the load is too small for this test"
        assert len(waits) == len(set(waits))
        for task in reads:
            await task

    play(scenario)
