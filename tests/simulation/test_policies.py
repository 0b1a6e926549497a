"""The policies at work in the simulated mesh: waiting for room, moving, priorities."""

import asyncio
from dataclasses import replace
from functools import partial
from statistics import fmean

import pytest

from meshift.backends.sim.engine import DEFAULT_MODEL
from meshift.backends.sim.parameters import SimParameters
from meshift.backends.sim.tokens import Generation, TokenSource
from meshift.schemas.requests import Priority
from meshift.schemas.steering import DecisionsRequest, DecisionSubject
from meshift.services.frontend.api import Chunk
from meshift.services.scheduler.core import SchedulerOptions
from meshift.services.scheduler.counters import HELD
from meshift.services.scheduler.holding import CROWD_ASKS_PER_S, HELD_MAX
from meshift.services.scheduler.policy.settings import PolicyName, PolicySettings
from meshift.services.simulation.mesh import MeshOptions, SimulatedMesh
from meshift.services.simulation.serving_run import ServingResult, run_serving, skipped, stepwise
from meshift.services.simulation.workload import generate, with_priorities
from tests.support.mesh_kit import Pending, play, request, settle, streams, tokens_of

SMALL = SimParameters(capacity=4000)


def scheduling(policy: PolicyName = "meshift", **sections: object) -> SchedulerOptions:
    return SchedulerOptions(scheduling=PolicySettings.model_validate({"policy": policy, **sections}))


def overloaded(policy: PolicyName) -> MeshOptions:
    return MeshOptions(instances=3, seed=1, parameters=SMALL, scheduler=scheduling(policy))


async def exact(pending: Pending) -> None:
    """Each stream is what an undisturbed engine gives."""
    source = TokenSource(SMALL.token_low, DEFAULT_MODEL.vocabulary_size, SMALL.eos_token_id, SMALL.eos_per_million)
    for ask, task in zip(pending.asks, pending.tasks, strict=True):
        generation = Generation(source, ask.prompt, (), ask.sampling)
        generation.prefill(0)
        assert tuple(tokens_of(await task)) == generation.output(0, generation.limit), ask.request_id


def serve(options: MeshOptions) -> ServingResult:
    """More than three instances can hold at times."""
    arrivals = [item for item in generate("M-M", 150, 3.0, 1) if item.input_tokens + item.output_tokens < 3500]
    return run_serving(options, with_priorities(arrivals, {1: 0.1}, 1))


@pytest.mark.parametrize("policy", ["meshift", pytest.param("llumnix", marks=pytest.mark.soak)])
def test_skipped_and_single_steps_are_the_same_also_with_moves(policy: PolicyName) -> None:
    fast, plain = serve(skipped(overloaded(policy))), serve(stepwise(overloaded(policy)))
    assert fast.digest() == plain.digest()
    assert sum(outcome.moves for outcome in fast.outcomes) > 0, "nothing moved"
    assert [outcome.moves for outcome in fast.outcomes] == [outcome.moves for outcome in plain.outcomes]


@pytest.mark.parametrize("policy", ["infaas++", "round-robin", "llumnix-base"])
def test_every_policy_serves_all(policy: PolicyName) -> None:
    result = serve(skipped(overloaded(policy)))
    assert all(outcome.finish is not None for outcome in result.outcomes)
    moved = sum(outcome.moves for outcome in result.outcomes)
    assert (moved > 0) == (policy == "llumnix-base")


def done(order: list[str], name: str, _: "asyncio.Task[list[Chunk]]") -> None:
    order.append(name)


def test_what_fits_nowhere_waits_at_the_scheduler_and_is_served_in_order() -> None:
    asks = [request(f"r{index}", 3000, 60) for index in range(8)]
    asks[6] = replace(asks[6], priority=Priority(scheduling=1))

    async def scenario(mesh: SimulatedMesh) -> None:
        assert mesh.scheduler is not None
        pending = streams(mesh, asks)
        await asyncio.sleep(1.0)
        assert [node.engine.load().waiting for node in mesh.workers.values()] == [1, 0]
        assert mesh.scheduler.held() == 5
        order: list[str] = []
        for ask, task in zip(asks, pending.tasks, strict=True):
            task.add_done_callback(partial(done, order, ask.request_id))
        await exact(pending)
        await asyncio.sleep(0)
        assert order.index("r6") < min(order.index(name) for name in ("r4", "r5", "r7"))
        assert mesh.scheduler.held() == 0
        await settle(mesh)

    play(scenario, parameters=SMALL)


def test_a_crowd_that_waits_does_not_keep_the_scheduler_busy() -> None:
    """Some for whom the line is too short: they ask by turns, and not as often as those in the line."""
    asks = [request(f"r{index}", 3000, 60) for index in range(HELD_MAX + 1_000)]

    async def scenario(mesh: SimulatedMesh) -> None:
        assert mesh.scheduler is not None
        pending = streams(mesh, asks)
        await asyncio.sleep(2.0)
        before = mesh.scheduler.counters.dispatches[HELD]
        await asyncio.sleep(2.0)
        assert mesh.scheduler.held() == HELD_MAX
        asked = mesh.scheduler.counters.dispatches[HELD] - before
        in_line = 2.0 * HELD_MAX / mesh.scheduler.settings.dispatch.hold_s_max
        assert asked < in_line + 2.1 * CROWD_ASKS_PER_S
        for task in pending.tasks:
            task.cancel()
        await asyncio.gather(*pending.tasks, return_exceptions=True)

    play(scenario, parameters=SMALL)


def test_who_waits_at_a_scheduler_that_dies_is_served_in_bypass() -> None:
    asks = [request(f"r{index}", 3000, 60) for index in range(6)]

    async def scenario(mesh: SimulatedMesh) -> None:
        pending = streams(mesh, asks)
        await asyncio.sleep(1.0)
        assert mesh.scheduler is not None
        assert mesh.scheduler.held() == 3
        await mesh.kill_scheduler()
        await exact(pending)
        assert mesh.frontends["frontend-0"].counters.placed_in_bypass == 3
        await mesh.start_scheduler()
        await settle(mesh)

    play(scenario, parameters=SMALL)


def test_one_that_gives_up_while_it_waits_takes_no_place() -> None:
    asks = [request(f"r{index}", 3000, 60) for index in range(4)]

    async def scenario(mesh: SimulatedMesh) -> None:
        frontend = mesh.frontends["frontend-0"]
        pending = streams(mesh, asks[:3])
        await asyncio.sleep(1.0)
        waits = asyncio.ensure_future(frontend.generate(asks[3]))
        await asyncio.sleep(0.5)
        assert mesh.scheduler is not None
        assert mesh.scheduler.held() == 1
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        await asyncio.sleep(1.0)
        assert mesh.scheduler.held() == 0
        await exact(pending)
        await settle(mesh)

    play(scenario, parameters=SMALL)


def test_what_waits_in_a_full_instance_moves_to_one_that_has_room() -> None:
    long_one, blocked = request("long", 3500, 400), request("blocked", 2000, 50)

    async def scenario(mesh: SimulatedMesh) -> None:
        for name in ("worker-1",):
            await mesh.kill_worker(name)
        pending = streams(mesh, [long_one, blocked])
        await asyncio.sleep(1.0)
        assert mesh.workers["worker-0"].engine.load().waiting == 1
        await asyncio.sleep(3.0)
        loads = [node.engine.load() for node in mesh.workers.values()]
        assert [(load.running, load.waiting) for load in loads] == [(1, 0), (1, 0)]
        await exact(pending)
        await settle(mesh)

    play(scenario, parameters=SMALL)


def test_a_high_request_gets_its_instance_to_itself_whatever_that_costs_if_nothing_bounds_it() -> None:
    normal = [request(f"n{index}", 300, 400) for index in range(8)]
    high = replace(request("high", 100, 300), priority=Priority(scheduling=1, execution=1))

    async def scenario(mesh: SimulatedMesh) -> None:
        pending = streams(mesh, [*normal, high])
        await asyncio.sleep(8.0)
        reports = [item.report for item in mesh.scheduler.observations()] if mesh.scheduler is not None else []
        mine, other = sorted(reports, key=lambda report: -report.headroom)
        assert mine.headroom == SMALL.capacity - 1600
        assert mine.classes[0].name == "high"
        assert mine.used <= 1700
        assert mine.running < other.running
        assert other.headroom == 0
        await exact(pending)
        await settle(mesh)

    play(scenario, parameters=SMALL, scheduler=scheduling(headroom={"others_slower_max": None}))


def test_what_a_high_request_may_cost_clears_one_of_many_instances_but_not_one_of_two() -> None:
    high = replace(request("high", 100, 300), priority=Priority(scheduling=1, execution=1))

    async def scenario(count: int, normal: int, mesh: SimulatedMesh) -> None:
        pending = streams(mesh, [*(request(f"n{index}", 300, 400) for index in range(normal * count)), high])
        await asyncio.sleep(8.0)
        assert mesh.scheduler is not None
        mine, *others = sorted(mesh.scheduler.observations(), key=lambda item: -item.report.headroom)
        assert mine.report.headroom == SMALL.capacity - 1600
        assert mine.granted is not None
        if count > 2:
            assert mine.report.used <= SMALL.capacity - mine.granted + 100
            assert mine.report.running <= min(item.report.running for item in others)
            assert mine.report.used < fmean(item.report.used for item in others)
        else:
            assert mine.granted < SMALL.capacity / 4
            assert mine.report.running >= 3, "the others stay"
            steering = mesh.frontends["frontend-0"].steering
            decided = await steering.decisions(DecisionsRequest(subject=DecisionSubject.HEADROOM))
            (look,) = (item for item in decided.current if item.subject is DecisionSubject.HEADROOM)
            assert look.decision == f"{mine.granted} tokens of headroom count"
            await steering.change_policy({"headroom": {"others_slower_max": None}})
            assert {item.granted for item in mesh.scheduler.observations()} == {None}
        await exact(pending)
        await settle(mesh)

    for count, normal in ((16, 4), (2, 4)):
        play(partial(scenario, count, normal), parameters=SMALL, instances=count)


def test_what_the_scheduler_keeps_of_instances_is_what_it_would_see_anew() -> None:
    """Through dispatches, moves, a drain and a restart."""
    asks = [request(f"r{index}", 300 + 40 * index, 200) for index in range(24)]
    looks: list[int] = []

    async def look(mesh: SimulatedMesh) -> None:
        while True:
            await asyncio.sleep(0.0131)
            scheduler = mesh.scheduler
            assert scheduler is not None
            kept, memory = scheduler.observations(), dict(scheduler._observed)
            scheduler._observed.clear()
            assert kept == scheduler.observations()
            scheduler._observed.update(memory)
            looks.append(sum(item.charged_requests + bool(item.moving_in) for item in kept))

    async def scenario(mesh: SimulatedMesh) -> None:
        looking = asyncio.get_running_loop().create_task(look(mesh))
        pending = streams(mesh, asks)
        await asyncio.sleep(2.0)
        await mesh.kill_worker("worker-0")
        await asyncio.sleep(4.0)
        mesh.workers["worker-1"].core.drain(5.0)
        await exact(pending)
        looking.cancel()
        assert not looking.done() or looking.cancelled(), looking.result()
        await settle(mesh)

    play(scenario, parameters=SMALL)
    assert len(looks) > 100
    assert any(looks)
