"""One simulated mesh under random trouble, from one seed, and what must hold of it."""

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass

from meshift.backends.sim.engine import DEFAULT_MODEL
from meshift.backends.sim.parameters import SimParameters
from meshift.backends.sim.pipeline import SimPipeline, SimStage
from meshift.backends.sim.tokens import Generation, TokenSource
from meshift.schemas.instances import InstanceState
from meshift.schemas.requests import TokenLogprob
from meshift.services.bus.memory import Mode
from meshift.services.frontend.core import FrontendOptions
from meshift.services.simulation import virtual_time
from meshift.services.simulation.chaos import Chaos, Event, plan
from meshift.services.simulation.clients import Client, Outcome, make_request
from meshift.services.simulation.mesh import MeshOptions, SimulatedMesh
from meshift.services.simulation.movers import Mover
from meshift.services.simulation.referee import Referee
from meshift.services.simulation.shapers import Shaper
from meshift.services.simulation.workload import Arrival
from meshift.services.worker.options import WorkerOptions

WORKERS = 3
FRONTENDS = 2
REQUESTS = 40
EVENTS = 8
TROUBLE_S = 15.0
CLIENT_DEADLINE_S = 300.0
SETTLE_S = 30.0
"""After the last request, at most: leases, tombstones of frontends that died, restarts."""

QUIET_S = 3.0
"""How long it must have been quiet then."""

MOVES_PER_S = 3.0
LOOK_S = 0.05

CHANGES_PER_S = 1.5
"""Of layouts, ordered by operators."""

LOGPROBS = (None, 0, None, 3)
"""What requests ask for, in turn."""

PARAMETERS = SimParameters(capacity=1600, eos_per_million=2000)
"""Small, so that requests wait and are preempted; some end early."""


def changing_pipeline() -> SimPipeline:
    """Three stages; the one in the middle has room for 16 of the 32 layers with 60 pages of KV, or for eight with 100
    and more, so that capacity shrinks and grows, and some targets don't fit."""
    even = SimPipeline.even(3, DEFAULT_MODEL.layers)
    memory = 16 * even.layer_weight_bytes + 4 * 60 * even.block_bytes(PARAMETERS)
    stages = (SimStage(), SimStage(memory_bytes=memory), SimStage())
    return even.model_copy(update={"layers": (12, 8, 12), "stages": stages})


@dataclass(frozen=True, slots=True)
class ChaosResult:
    """What a run came to."""

    seed: int
    outcomes: tuple[Outcome, ...]
    virtual_s: float
    moves: dict[tuple[str, str, str], int]
    """How many, by mode, outcome and refusal."""
    changes: dict[tuple[str, str], int]
    """Of layouts: how many, by outcome and refusal."""

    def digest(self) -> int:
        """The same for the same course of events."""
        return hash(tuple((o.arrival_s, o.first_s, o.last_s, o.tries, o.attempts, *o.tokens) for o in self.outcomes))


def run_chaos(
    seed: int, requests: int = REQUESTS, events: int = EVENTS, pipeline: SimPipeline | None = None
) -> ChaosResult:
    """Run it; with a `pipeline` layouts change all the time, too. Raises AssertionError where an invariant is broken,
    or what a client got that should have been served."""
    return virtual_time.run(_run(seed, requests, events, pipeline))


def planned_events(seed: int, events: int = EVENTS, *, layouts: bool = False) -> list[Event]:
    """The trouble that a seed makes, to read beside a failure."""
    workers = [f"worker-{index}" for index in range(WORKERS)]
    frontends = [f"frontend-{index}" for index in range(FRONTENDS)]
    return plan(random.Random(f"events/{seed}"), workers, frontends, TROUBLE_S, events, layouts=layouts)


def expected_output(outcome: Outcome) -> tuple[tuple[int, ...], list[TokenLogprob] | None]:
    """Tokens and log-probabilities that an undisturbed engine gives."""
    source = TokenSource(
        PARAMETERS.token_low,
        DEFAULT_MODEL.vocabulary_size,
        PARAMETERS.eos_token_id,
        PARAMETERS.eos_per_million,
    )
    generation = Generation(source, outcome.request.prompt, (), outcome.request.sampling)
    generation.prefill(0)
    logprobs = generation.logprobs(0, generation.limit)
    return generation.output(0, generation.limit), None if logprobs is None else list(logprobs)


async def _run(seed: int, requests: int, events: int, pipeline: SimPipeline | None) -> ChaosResult:
    mesh = SimulatedMesh(_options(seed, pipeline))
    await mesh.start()
    rng = random.Random(f"requests/{seed}")
    loop = asyncio.get_running_loop()
    referee = Referee(mesh, LOOK_S)
    referee.start()
    mover = Mover(mesh, random.Random(f"moves/{seed}"), MOVES_PER_S)
    moving = loop.create_task(mover.run(TROUBLE_S))
    shaper = Shaper(mesh, random.Random(f"layouts/{seed}"), CHANGES_PER_S)
    shaping = loop.create_task(shaper.run(TROUBLE_S if pipeline is not None else 0.0))
    trouble = loop.create_task(Chaos(mesh, planned_events(seed, events, layouts=pipeline is not None)).run())
    clients = []
    for number, arrival in enumerate(_arrivals(rng, requests)):
        await asyncio.sleep(rng.expovariate(requests / TROUBLE_S))
        client = Client(mesh, rng.choice(mesh.frontend_names), retry_s=0.5)
        request = make_request(arrival, DEFAULT_MODEL.name, rng, LOGPROBS[number % len(LOGPROBS)])
        clients.append(loop.create_task(client.run(request, CLIENT_DEADLINE_S)))
    await trouble
    await moving
    await shaping
    outcomes = tuple([await client for client in clients])
    for outcome in outcomes:
        given = (tuple(outcome.tokens), outcome.logprobs)
        assert given == expected_output(outcome), f"seed {seed}: {outcome.request.request_id} differs"
    await _settle(mesh, loop.time() + SETTLE_S)
    referee.check()
    await mesh.stop()
    return ChaosResult(seed, outcomes, loop.time(), dict(mover.outcomes), dict(shaper.outcomes))


async def _settle(mesh: SimulatedMesh, until_s: float) -> None:
    """Until it is quiet, and a while later still is. Raises AssertionError."""
    loop = asyncio.get_running_loop()
    is_quiet = False
    while not is_quiet and loop.time() < until_s:
        await asyncio.sleep(QUIET_S)
        with suppress(AssertionError):
            await check_quiet(mesh)
            is_quiet = True
    await asyncio.sleep(QUIET_S)
    await check_quiet(mesh)


def _options(seed: int, pipeline: SimPipeline | None) -> MeshOptions:
    return MeshOptions(
        instances=WORKERS,
        frontends=FRONTENDS,
        seed=seed,
        bus_mode=Mode.VALIDATE,
        parameters=PARAMETERS,
        worker=WorkerOptions(engine_stall_s=3.0),
        frontend=FrontendOptions(),
        pipeline=pipeline,
    )


def _arrivals(rng: random.Random, count: int) -> list[Arrival]:
    return [
        Arrival(f"r{index}", 0.0, rng.randint(1, 400), min(200, 1 + round(rng.expovariate(1 / 60))))
        for index in range(count)
    ]


async def check_quiet(mesh: SimulatedMesh) -> None:
    """Nothing runs, so everything must be free, known and ready. Raises AssertionError."""
    names = set(mesh.worker_names)
    for name, node in mesh.workers.items():
        await node.engine.check_integrity()
        load = node.engine.load()
        assert node.core.state is InstanceState.READY, f"{name} is {node.core.state}"
        assert load.used == load.reserved == load.running == load.waiting == 0, f"{name} still has {load}"
        assert load.free + load.cached == load.capacity, f"{name} leaks: {load}"
        assert node.core.open_requests() == 0, f"{name} keeps {node.core.open_requests()} requests"
        layouts = node.core.layouts
        assert layouts.change_id == "", f"{name} still changes its layout: {layouts.change_id}"
        moves = node.core.moves
        assert moves.running() == moves.incoming() == 0, f"{name} still moves: {moves.describe()}"
    for name, frontend in mesh.frontends.items():
        assert frontend.open_streams() == 0, f"{name} has {frontend.open_streams()} streams"
        assert frontend.scheduler_alive(), f"{name} is in bypass mode"
        known = {report.owner.instance_id for report in frontend.instances()}
        assert known == names, f"{name} knows {sorted(known)}"
    assert mesh.scheduler is not None
    assert {report.owner.instance_id for report in mesh.scheduler.instances()} == names
