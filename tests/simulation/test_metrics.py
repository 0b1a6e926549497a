"""What the services of a simulated mesh export, and that it is all that the catalogue names."""

import asyncio
from collections.abc import Callable, Iterable

import pytest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from meshift.backends.sim.pipeline import SimPipeline
from meshift.schemas.errors import NotFound
from meshift.services.coordinator.metrics import CoordinatorCollector
from meshift.services.exposition import BusCollector, Exposition
from meshift.services.frontend.api import GenerateRequest
from meshift.services.frontend.http.observing import HttpCounters
from meshift.services.frontend.metrics import FrontendCollector
from meshift.services.scheduler.metrics import SchedulerCollector
from meshift.services.simulation.mesh import SimulatedMesh
from meshift.services.worker.metrics import WorkerCollector
from meshift.tracing.metrics import METRICS
from tests.support import mesh_kit
from tests.support.mesh_kit import read, request


def play(scenario: mesh_kit.Scenario) -> None:
    """In a mesh of pipelines, which has a coordinator."""
    mesh_kit.play(scenario, pipeline=SimPipeline.even(2, 32))


def expositions(mesh: SimulatedMesh) -> dict[str, Exposition]:
    """Of several services in this one process."""
    assert mesh.scheduler is not None
    assert mesh.coordinator is not None
    http = HttpCounters()
    http.answered("/v1/models", 200, 0.01)
    result = {
        "frontend-0": Exposition(
            FrontendCollector(mesh.frontends["frontend-0"], http),
            BusCollector("frontend", mesh.frontends["frontend-0"]._bus.counters),
        ),
        "scheduler": Exposition(SchedulerCollector(mesh.scheduler)),
        "coordinator": Exposition(CoordinatorCollector(mesh.coordinator)),
    }
    return result | {name: Exposition(WorkerCollector(node.core)) for name, node in mesh.workers.items()}


def families(exposition: Exposition) -> dict[str, Family]:
    text, _ = exposition.render()
    return {family.name: family for family in text_string_to_metric_families(text.decode())}


Value = Callable[..., float]


def values(all_families: Iterable[Family]) -> Value:
    """`value("meshift_x_total", label="y")`."""
    samples = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in all_families
        for sample in family.samples
    }
    return lambda name, **labels: samples[name, frozenset(labels.items())]


def scrape(mesh: SimulatedMesh, service: str) -> Value:
    return values(families(expositions(mesh)[service]).values())


def test_all_that_the_catalogue_names_is_exported_and_nothing_else() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        await read(mesh.frontends["frontend-0"], request())
        seen = {
            name: family for exposition in expositions(mesh).values() for name, family in families(exposition).items()
        }
        ours = {name: family for name, family in seen.items() if not name.startswith("process_")}
        assert set(ours) == set(METRICS)
        for name, family in ours.items():
            assert family.type == METRICS[name].kind
            assert family.documentation == METRICS[name].help
            for sample in family.samples:
                assert sample.name in METRICS[name].series
                assert set(sample.labels) - {"le"} == set(METRICS[name].labels)

    play(scenario)


def test_the_frontend_counts_and_times_its_streams() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        frontend = mesh.frontends["frontend-0"]
        await read(frontend, request("a", inputs=50, outputs=100))
        handle = await frontend.generate(request("b", outputs=1000))
        await anext(aiter(handle))
        value = scrape(mesh, "frontend-0")
        assert value("meshift_streams_open") == 1
        await handle.cancel()
        value = scrape(mesh, "frontend-0")
        assert value("meshift_streams_open") == 0
        assert value("meshift_streams_ended_total", reason="length") == 1
        assert value("meshift_streams_ended_total", reason="cancelled") == 1
        assert value("meshift_tokens_total", type="input") == 100
        assert value("gen_ai_server_time_to_first_token_seconds_count") == 2
        assert value("meshift_inter_token_latency_seconds_count") >= 99
        assert value("gen_ai_server_request_duration_seconds_count") == 2
        assert value("meshift_placements_total", by="scheduler") == 2
        assert value("meshift_bypass") == 0

    play(scenario)


def test_times_are_those_that_the_client_sees() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        loop = asyncio.get_running_loop()
        frontend = mesh.frontends["frontend-0"]
        begin_s, times_s = loop.time(), []
        async for chunk in await frontend.generate(request(outputs=100)):
            times_s += [loop.time()] * len(chunk.tokens)
        value = scrape(mesh, "frontend-0")
        first_s, total_s = times_s[0] - begin_s, times_s[-1] - begin_s
        assert value("gen_ai_server_time_to_first_token_seconds_sum") == pytest.approx(first_s)
        assert value("gen_ai_server_request_duration_seconds_sum") == pytest.approx(total_s)
        assert value("meshift_inter_token_latency_seconds_sum") == pytest.approx(total_s - first_s)
        assert value("meshift_inter_token_latency_seconds_count") == 99
        assert value("gen_ai_server_time_per_output_token_seconds_sum") == pytest.approx((total_s - first_s) / 99)

    play(scenario)


def test_instances_are_shown_by_the_frontend_and_go_with_them() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        value = scrape(mesh, "frontend-0")
        capacity = value("meshift_kv_capacity", instance_id="worker-1")
        states = ("used", "cached", "free", "reserved")
        assert capacity == sum(value("meshift_kv_tokens", instance_id="worker-1", state=state) for state in states)
        assert value("meshift_instance_state", instance_id="worker-1", state="ready") == 1
        await mesh.kill_worker("worker-1")
        await asyncio.sleep(1.0)
        value = scrape(mesh, "frontend-0")
        with pytest.raises(KeyError):
            value("meshift_kv_capacity", instance_id="worker-1")
        assert value("meshift_kv_capacity", instance_id="worker-0") == capacity

    play(scenario)


def test_losses_are_counted() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        frontend = mesh.frontends["frontend-0"]
        await mesh.kill_scheduler()
        handle = await frontend.generate(request(outputs=400))
        await anext(aiter(handle))
        assert handle.stream.owner is not None
        await mesh.kill_worker(handle.stream.owner.instance_id)
        assert [chunk async for chunk in handle]
        http = HttpCounters()
        value = values(families(Exposition(FrontendCollector(frontend, http))).values())
        assert value("meshift_resumes_total") == 1
        assert value("meshift_bypass") == 1
        assert value("meshift_placements_total", by="bypass") == 2
        (other,) = [node for node in mesh.workers.values() if node.core.owner == handle.stream.owner]
        value = values(families(Exposition(WorkerCollector(other.core))).values())
        name = other.core.owner.instance_id
        assert value("meshift_submissions_total", instance_id=name, outcome="accepted") == 1
        assert value("meshift_requests_ended_total", instance_id=name, reason="length") == 1
        assert value("meshift_engine_steps_total", instance_id=name) > 0

    play(scenario)


def test_the_scheduler_counts_its_decisions() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        ask = request()
        await read(mesh.frontends["frontend-0"], ask)
        with pytest.raises(NotFound):
            await read(mesh.frontends["frontend-0"], GenerateRequest("x", "other", ask.prompt, ask.sampling))
        value = scrape(mesh, "scheduler")
        assert value("meshift_dispatches_total", decision="fits") == 1
        assert value("meshift_dispatches_total", decision="not_found") == 1
        assert value("meshift_dispatch_duration_seconds_count") == 2
        assert value("meshift_instances") == 2

    play(scenario)


def test_a_worker_that_is_not_up_can_be_scraped() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        node = mesh.workers["worker-0"]
        node.core._info = None
        assert "meshift_unacknowledged" in families(Exposition(WorkerCollector(node.core)))

    play(scenario)
