"""One trace a move, linked to the request's; what the request does after it stays in its own trace."""

from typing import Any

from opentelemetry.trace import StatusCode
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import CollectorRegistry

from meshift.schemas.moves import MoveMode, MoveOutcome, MoveReport
from meshift.services.simulation.mesh import SimulatedMesh
from meshift.services.worker.metrics import WorkerCollector
from meshift.tracing import names
from tests.support.mesh_kit import play, request, streams
from tests.support.move_kit import Operator, running, until
from tests.support.traces import Node, Recorder, context_of


def recorded(**options: Any) -> tuple[Node, Node, MoveReport]:
    """The request's trace, the move's, and what was reported."""
    recorder, reports = Recorder(), []

    async def scenario(mesh: SimulatedMesh) -> None:
        reading = streams(mesh, [request("m", 60, 100)])
        operator = await Operator.join(mesh)
        node, _ = await running(mesh, "m", 3)
        reports.append(await operator.move(node, "m", **options))
        await reading.tasks[0]

    play(scenario, tracer=recorder.tracer)
    roots = {root.name: root for root in recorder.trees()}
    move = roots.pop(names.MOVE)
    (asked,) = roots.values()
    return asked, move, reports[0]


def test_the_tree_of_a_move() -> None:
    _, move, report = recorded()
    assert move.shape() == (
        names.MOVE,
        [
            # The scheduler chose the destination.
            names.DECIDE,
            names.MOVE_RESERVE,
            (names.MOVE_ROUND, [names.MOVE_TRANSFER]),
            names.MOVE_RESERVE,
            (names.MOVE_FREEZE, [names.MOVE_TRANSFER]),
            names.MOVE_COMMIT,
            names.MOVE_RELEASE,
        ],
    )
    figures = report.figures
    for name, value in (
        (names.REQUEST_ID, "m"),
        (names.HOP, 1),
        (names.SOURCE, str(report.source)),
        (names.DESTINATION, str(report.destination)),
        (names.MOVE_MODE, "live"),
        (names.MOVE_OUTCOME, "moved"),
        (names.MOVE_ROUNDS, 2),
        (names.TRANSFER_TOKENS, figures.tokens),
        (names.TRANSFER_BYTES, figures.byte_count),
        (names.TRANSFER_GATHER, figures.gather_ns / 1e9),
        (names.MOVE_FROZEN, figures.frozen_ns / 1e9),
    ):
        assert move.attribute(name) == value, name
    live, last = move.child(names.MOVE_ROUND), move.child(names.MOVE_FREEZE)
    sent = [node.attribute(names.TRANSFER_TOKENS) for node in (live, last)]
    assert sum(sent) == figures.tokens
    assert sent[0] > sent[1]


def test_it_is_linked_to_the_requests_trace() -> None:
    asked, move, _ = recorded()
    (before, after) = asked.all(names.GENERATE)
    (link,) = move.span.links
    assert link.context.span_id == context_of(before.span).span_id
    assert context_of(move.span).trace_id != context_of(asked.span).trace_id
    assert (before.attribute(names.HOP), after.attribute(names.HOP)) == (0, 1)
    # The new owner's part hangs below the old one's, which says where it went.
    assert after in before.children
    assert [event.name for event in before.span.events] == [names.EVENT_OWNER_CHANGED]
    assert before.attribute(names.DESTINATION) == after.attribute(names.OWNER)
    assert after.attribute(names.SOURCE) == before.attribute(names.OWNER)
    assert [child.name for child in after.children] == [names.DECODE], "its KV came with it"
    tokens = [node.attribute(names.USAGE_OUTPUT_TOKENS) for node in (before, after)]
    assert sum(tokens) == 100


def test_a_recomputation_shows_its_prefill() -> None:
    asked, move, _ = recorded(mode=MoveMode.RECOMPUTE)
    (_, after) = asked.all(names.GENERATE)
    assert {child.name for child in after.children} >= {names.PREFILL, names.DECODE}
    assert [child.name for child in move.children] == [
        names.DECIDE,
        names.MOVE_RESERVE,
        names.MOVE_FREEZE,
        names.MOVE_COMMIT,
        names.MOVE_RELEASE,
    ]


def test_a_move_that_comes_to_nothing_says_why() -> None:
    asked, move, report = recorded(deadline_s=0.02)
    assert report.outcome is MoveOutcome.STAYED
    assert move.span.status.status_code is StatusCode.ERROR
    assert move.attribute(names.MOVE_REFUSAL) == "deadline"
    assert move.attribute(names.MOVE_OUTCOME) == "stayed"
    assert move.children[-1].name == names.MOVE_RESUME
    (only,) = asked.all(names.GENERATE)
    assert only.attribute(names.USAGE_OUTPUT_TOKENS) == 100


def test_metrics_of_moves() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        reading = streams(mesh, [request("m", 60, 100)])
        operator = await Operator.join(mesh)
        node, record = await running(mesh, "m", 3)
        (there,) = [other for other in mesh.workers.values() if other is not node]
        registries = []
        for each in (node, there):
            registry = CollectorRegistry()
            registry.register(WorkerCollector(each.core))
            registries.append(registry)

        def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
            samples = [
                sample.value
                for family in text_string_to_metric_families(generate_latest(registry).decode())
                for sample in family.samples
                if sample.name == name and labels.items() <= sample.labels.items()
            ]
            (found,) = samples
            return found

        assert value(registries[0], "meshift_moves_running", direction="out") == 0
        report = await operator.moved(node, "m")
        await until(lambda: not record.moving, "the end of the move")
        out, into = registries
        assert value(out, "meshift_moves_total", mode="live", outcome="moved", refusal="none") == 1
        assert value(out, "meshift_move_io_bytes_total") == report.figures.byte_count
        assert value(out, "meshift_move_tokens_total") == report.figures.tokens
        assert value(out, "meshift_move_copy_rounds_total") == 2
        assert value(out, "meshift_move_frozen_time_seconds_count") == 1
        assert value(out, "meshift_move_duration_seconds_sum") == report.figures.duration_ns / 1e9
        assert value(into, "meshift_moves_in_total", outcome="committed") == 1
        assert value(into, "meshift_moves_running", direction="in") == 0
        await reading.tasks[0]

    play(scenario)
