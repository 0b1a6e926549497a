"""One virtual-time run of a whole mesh under a generated workload."""

import asyncio
import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from meshift.backends.sim.engine import DEFAULT_MODEL
from meshift.services.bus.memory import Mode
from meshift.services.frontend.core import FrontendOptions
from meshift.services.scheduler.core import SchedulerOptions
from meshift.services.simulation import virtual_time
from meshift.services.simulation.clients import Client, Outcome, make_request
from meshift.services.simulation.elastic import Elastic
from meshift.services.simulation.measures import Measures, measure
from meshift.services.simulation.mesh import MeshOptions, SimulatedMesh
from meshift.services.simulation.probe import ClusterProbe, ClusterSums
from meshift.services.simulation.workload import Arrival

CLIENT_DEADLINE_S = 3600.0

SWEEP_FRONTEND = FrontendOptions(silence_s=60.0)
"""With skipped steps a stream is silent until its end; asking for it would only cost time."""


@dataclass(frozen=True, slots=True)
class ServingResult:
    """What the clients saw, in order of arrival."""

    outcomes: tuple[Outcome, ...] = field(repr=False)
    """Not told when the task that returns them is: that alone took seconds."""
    virtual_s: float
    steps: int
    sums: ClusterSums = field(default_factory=ClusterSums)
    instances_paid_mean: float = 0.0
    """Instances there, those that are starting or draining included; mean over time."""

    def measures(self) -> Measures:
        """Of all requests."""
        return measure(self.outcomes, self.sums, self.virtual_s)

    def measures_by_priority(self) -> dict[int, Measures]:
        """Of each class of requests."""
        classes: dict[int, list[Outcome]] = {}
        for outcome in self.outcomes:
            classes.setdefault(outcome.request.priority.execution, []).append(outcome)
        return {key: measure(classes[key], self.sums, self.virtual_s) for key in sorted(classes)}

    def digest(self) -> str:
        """The same for the same times (to the nanosecond) and tokens: 16 hexadecimal digits."""
        digest = hashlib.sha256()
        for outcome in self.outcomes:
            finish = outcome.finish
            assert finish is not None
            times = (outcome.arrival_s, outcome.first_s, outcome.last_s)
            line = (outcome.request.request_id, *times, finish.preemptions, finish.preemption_loss_ns)
            digest.update(repr(line).encode())
            digest.update(outcome.tokens.tobytes())
        return digest.hexdigest()[:16]


def skipped(options: MeshOptions) -> MeshOptions:
    """The fast way: equal decode steps are one event, messages travel as objects."""
    return replace(options, skip_steps=True, emit="edges", bus_mode=Mode.DIRECT, frontend=SWEEP_FRONTEND)


def stepwise(options: MeshOptions) -> MeshOptions:
    """The plain way: every step is an event, and sends one validated message to each frontend."""
    return replace(options, skip_steps=False, emit="step", bus_mode=Mode.VALIDATE, frontend=SWEEP_FRONTEND)


def run_serving(
    options: MeshOptions, arrivals: list[Arrival], on_done: Callable[[int], None] = lambda count: None
) -> ServingResult:
    """Serve the workload. `on_done` gets the number of requests that have ended."""
    return virtual_time.run(_run(options, arrivals, on_done))


def _without_scaling(options: SchedulerOptions) -> SchedulerOptions:
    """`Elastic` does what the policy decides; the scheduler's own scaler, which would find no launcher, must not drain
    the same instances beside it."""
    return options.model_copy(update={"scheduling": options.scheduling.replaced({"scaling": {"enabled": False}})})


async def _run(options: MeshOptions, arrivals: list[Arrival], on_done: Callable[[int], None]) -> ServingResult:
    loop = asyncio.get_running_loop()
    mesh = SimulatedMesh(replace(options, scheduler=_without_scaling(options.scheduler)))
    await mesh.start()
    probe = ClusterProbe(mesh, options.worker.report_interval_s)
    probe.start()
    elastic = Elastic(mesh, options.scheduler.scheduling.scaling, options.worker.report_interval_s)
    if options.scheduler.scheduling.scaling.enabled:
        elastic.start()
    rng = random.Random(f"prompts/{options.seed}")
    begin_s = loop.time()
    tasks = []
    for number, arrival in enumerate(arrivals):
        await asyncio.sleep(max(0.0, begin_s + arrival.arrival_s - loop.time()))
        client = Client(mesh, mesh.frontend_names[number % options.frontends], retry_s=1.0)
        tasks.append(loop.create_task(client.run(make_request(arrival, DEFAULT_MODEL.name, rng), CLIENT_DEADLINE_S)))
    outcomes = []
    for number, task in enumerate(tasks, start=1):
        outcomes.append(await task)
        on_done(number)
    steps = sum(node.engine.load().step_count for node in mesh.workers.values())
    probe.stop()
    virtual_s = loop.time()
    await elastic.stop()
    await mesh.stop()
    paid = elastic.instances / elastic.looks if elastic.looks else float(options.instances)
    return ServingResult(tuple(outcomes), virtual_s, steps, probe.sums, paid)
