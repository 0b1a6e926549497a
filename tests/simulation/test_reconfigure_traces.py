"""One trace a reconfiguration; and what workers and coordinator count of it."""

from opentelemetry.trace import StatusCode
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import CollectorRegistry

from meshift.schemas.reconfiguring import ReconfigureReport
from meshift.services.coordinator.metrics import CoordinatorCollector
from meshift.services.simulation.mesh import SimulatedMesh
from meshift.services.worker.metrics import WorkerCollector
from meshift.tracing import names
from tests.simulation.test_reconfigure import NAME, cancelled, play_reconfigure, reconfigure, running, whole
from tests.support.mesh_kit import eight, outsider
from tests.support.traces import Node, Recorder


def traced(*, cancel: bool = False) -> tuple[Node, ReconfigureReport, dict[tuple[str, ...], float]]:
    """Its trace, its report, and all samples of metrics."""
    recorder, asks = Recorder(), eight()
    reports: list[ReconfigureReport] = []
    samples: dict[tuple[str, ...], float] = {}

    async def scenario(mesh: SimulatedMesh) -> None:
        bus, pending = await outsider(mesh), await running(mesh, asks)
        reports.append(await (cancelled(bus, mesh, (20, 12)) if cancel else reconfigure(bus, (20, 12))))
        await whole(mesh, pending)
        assert mesh.coordinator is not None
        for collector in (CoordinatorCollector(mesh.coordinator), WorkerCollector(mesh.workers[NAME].core)):
            registry = CollectorRegistry()
            registry.register(collector)
            for family in text_string_to_metric_families(generate_latest(registry).decode()):
                for sample in family.samples:
                    samples[(sample.name, *(value for name, value in sorted(sample.labels.items())))] = sample.value

    play_reconfigure(scenario, tracer=recorder.tracer)
    (root,) = [root for root in recorder.trees() if root.name == names.RECONFIGURE]
    return root, reports[0], samples


def test_the_tree_of_a_reconfiguration() -> None:
    root, report, samples = traced()
    assert [node.name for node in root.children] == [
        names.RECONFIGURE_FEASIBILITY,
        names.RECONFIGURE_BEGIN,
        names.RECONFIGURE_RESIZE,
        names.RECONFIGURE_LOAD,
        names.RECONFIGURE_COPY,
        names.RECONFIGURE_COMMIT,
    ]
    assert report.change is not None
    for name, value in (
        (names.OWNER, str(report.owner)),
        (names.LAYOUT_CHANGE, report.change_id),
        (names.LAYOUT_FROM, "16/16"),
        (names.LAYOUT_TO, "20/12"),
        (names.LAYOUT_EPOCH, 1),
        (names.LAYOUT_OUTCOME, "committed"),
        (names.LAYOUT_ROUNDS, report.change.stages[0].rounds),
        (names.TRANSFER_BYTES, report.change.stages[0].byte_count),
        (names.LAYOUT_STOPS, tuple(stop / 1e9 for stop in report.change.stop_ns)),
    ):
        assert root.attribute(name) == value, name
    looks = root.child(names.RECONFIGURE_COPY).span.events
    assert [event.attributes[names.LAYOUT_LAG] for event in looks if event.attributes] == [
        lag for _, lag in report.lag_tokens
    ]
    assert root.span.status.status_code is StatusCode.UNSET
    assert samples["meshift_reconfigurations_total", "committed", "none"] == 1
    assert samples["meshift_layout_changes_total", NAME, "committed", "none"] == 1
    assert samples["meshift_layout_epochs", NAME] == 1
    assert (samples["meshift_layout_layers", NAME, "0"], samples["meshift_layout_layers", NAME, "1"]) == (20, 12)
    assert samples["meshift_layout_io_bytes_total", NAME] == report.change.stages[0].byte_count
    assert samples["meshift_reconfigure_stop_seconds_count", NAME] == 1
    assert samples["meshift_reconfiguration_phase_seconds_count", "converging"] == 1
    assert samples["meshift_reconfigurations_running",] == 0


def test_one_that_is_undone() -> None:
    root, _, samples = traced(cancel=True)
    assert root.children[-1].name == names.RECONFIGURE_ABORT
    assert root.attribute(names.LAYOUT_OUTCOME) == "aborted"
    assert root.attribute(names.LAYOUT_REFUSAL) == "cancelled"
    assert root.span.status.status_code is StatusCode.ERROR
    assert samples["meshift_reconfigurations_total", "aborted", "cancelled"] == 1
    assert samples["meshift_layout_changes_total", NAME, "aborted", "cancelled"] == 1
