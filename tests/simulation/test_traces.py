"""One trace a request, whatever becomes of it: the real services on the memory bus, spans in memory."""

import asyncio
import random
from typing import Any

import pytest
from opentelemetry import context, trace
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, Sampler
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, StatusCode, TraceFlags

from meshift.schemas.errors import NotFound
from meshift.services.frontend.api import GenerateRequest
from meshift.services.simulation.mesh import SimulatedMesh
from meshift.tracing import names
from tests.support.mesh_kit import Scenario, play, read, request, tokens_of, undisturbed
from tests.support.traces import Node, Recorder, begin_ns, context_of, end_ns

GENERATE = (names.GENERATE, [names.QUEUE, names.PREFILL, names.DECODE])
PLACED = [(names.DISPATCH, [names.DECIDE]), (names.SUBMIT, [GENERATE])]


def recorded(scenario: Scenario, recorder: Recorder | None = None, **options: Any) -> list[Node]:
    """The trees of spans that the scenario leaves."""
    used = recorder or Recorder()
    play(scenario, tracer=used.tracer, **options)
    return used.trees()


def test_the_tree_of_a_request() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        await read(mesh.frontends["frontend-0"], request())

    (root,) = recorded(scenario)
    model = root.attribute(names.REQUEST_MODEL)
    assert root.shape() == (f"chat {model}", PLACED)
    assert root.span.status.status_code is StatusCode.UNSET


def test_what_the_spans_say() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        await read(mesh.frontends["frontend-0"], request(inputs=50, outputs=100))

    (root,) = recorded(scenario)
    assert root.attribute(names.USAGE_INPUT_TOKENS) == 50
    assert root.attribute(names.USAGE_OUTPUT_TOKENS) == 100
    assert root.attribute(names.RESPONSE_FINISH_REASONS) == ("length",)
    assert root.attribute(names.ATTEMPT) == 1
    assert [event.name for event in root.span.events] == [names.EVENT_FIRST_TOKEN]
    decide = root.child(names.DISPATCH).child(names.DECIDE)
    assert decide.attribute(names.DISPATCH_CANDIDATES) == 2
    assert decide.attribute(names.DISPATCH_DEMAND) == 50
    assert "greatest of 2" in decide.attribute(names.DISPATCH_REASON)
    assert decide.span.kind is SpanKind.SERVER
    submit = root.child(names.SUBMIT)
    generate = submit.child(names.GENERATE)
    owner = decide.attribute(names.OWNER)
    for node in (root, root.child(names.DISPATCH), submit, generate):
        assert node.attribute(names.OWNER) == owner
    assert generate.attribute(names.HOP) == 0
    assert generate.attribute(names.PREEMPTIONS) == 0
    assert generate.attribute(names.USAGE_CACHED_TOKENS) == 0
    assert generate.attribute(names.USAGE_OUTPUT_TOKENS) == 100


def test_the_engines_spans_follow_one_another() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        await read(mesh.frontends["frontend-0"], request())

    (root,) = recorded(scenario)
    (generate,) = root.all(names.GENERATE)
    queue, prefill, decode = (generate.child(name).span for name in (names.QUEUE, names.PREFILL, names.DECODE))
    assert begin_ns(generate.span) == begin_ns(queue)
    assert end_ns(queue) == begin_ns(prefill)
    assert end_ns(prefill) == begin_ns(decode)
    assert end_ns(decode) <= end_ns(generate.span)


def test_a_resumed_request_stays_one_trace() -> None:
    ask = request(outputs=400)

    async def scenario(mesh: SimulatedMesh) -> None:
        frontend = mesh.frontends["frontend-0"]
        handle = await frontend.generate(ask)
        chunks = [await anext(aiter(handle))]
        assert handle.stream.owner is not None
        await mesh.kill_worker(handle.stream.owner.instance_id)
        chunks += [chunk async for chunk in handle]
        assert tokens_of(chunks) == undisturbed_tokens

    undisturbed_tokens = undisturbed(ask)
    (root,) = recorded(scenario)
    assert [event.name for event in root.span.events] == [names.EVENT_FIRST_TOKEN, names.EVENT_OWNER_LOST]
    assert root.attribute(names.ATTEMPT) == 2
    assert root.attribute(names.USAGE_OUTPUT_TOKENS) == 400
    resume = root.child(names.RESUME)
    assert [node.name for node in resume.children] == [names.DISPATCH, names.SUBMIT]
    again = resume.child(names.SUBMIT)
    assert (root.child(names.SUBMIT).attribute(names.ATTEMPT), again.attribute(names.ATTEMPT)) == (1, 2)
    assert again.child(names.GENERATE).attribute(names.RESUMED_FROM) > 0
    assert again.attribute(names.OWNER) != resume.attribute(names.SOURCE)
    (link,) = resume.span.links
    assert link.context.span_id == context_of(root.child(names.SUBMIT).span).span_id
    assert link.attributes == {names.ATTEMPT: 1}


def test_tasks_of_one_stream_do_not_run_in_anothers_trace() -> None:
    """Losing a worker starts the tasks of all its streams at once, from a handler that belongs to none of them."""
    asks = [request(f"r{index}", outputs=400) for index in range(6)]

    async def scenario(mesh: SimulatedMesh) -> None:
        frontend = mesh.frontends["frontend-0"]
        tasks = [asyncio.get_running_loop().create_task(read(frontend, ask)) for ask in asks]
        await asyncio.sleep(1.0)
        await mesh.kill_worker("worker-0")
        for task in tasks:
            tokens_of(await task)

    trees = recorded(scenario)
    assert len(trees) == len(asks)
    assert any(tree.all(names.RESUME) for tree in trees)
    for tree in trees:
        mine = tree.attribute(names.REQUEST_ID)
        for node in (*tree.all(names.SUBMIT), *tree.all(names.GENERATE), *tree.all(names.DECIDE)):
            assert node.attribute(names.REQUEST_ID) == mine


def test_without_a_scheduler_the_dispatch_says_bypass() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        await mesh.kill_scheduler()
        await read(mesh.frontends["frontend-0"], request())

    (root,) = recorded(scenario)
    assert root.child(names.DISPATCH).attribute(names.DISPATCH_BYPASS) is True
    assert not root.all(names.DECIDE)


def test_a_refused_request_says_why() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        ask = request()
        other = GenerateRequest(ask.request_id, "other", ask.prompt, ask.sampling)
        with pytest.raises(NotFound):
            await read(mesh.frontends["frontend-0"], other)

    (root,) = recorded(scenario)
    assert root.attribute(names.ERROR_TYPE) == "not_found"
    assert root.span.status.status_code is StatusCode.ERROR
    assert root.child(names.DISPATCH).attribute(names.ERROR_TYPE) == "not_found"


def test_a_cancelled_request_ends_everywhere() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        handle = await mesh.frontends["frontend-0"].generate(request(outputs=1000))
        await anext(aiter(handle))
        await handle.cancel()
        await asyncio.sleep(1.0)

    (root,) = recorded(scenario)
    assert root.attribute(names.RESPONSE_FINISH_REASONS) == ("cancelled",)
    (generate,) = root.all(names.GENERATE)
    assert generate.attribute(names.RESPONSE_FINISH_REASONS) == ("cancelled",)


def test_spans_of_an_instance_that_leaves_are_ended() -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        handle = await mesh.frontends["frontend-0"].generate(request(outputs=1000))
        await anext(aiter(handle))
        assert handle.stream.owner is not None
        await mesh.workers[handle.stream.owner.instance_id].core.stop()
        await handle.cancel()

    (root,) = recorded(scenario)
    (generate,) = root.all(names.GENERATE)
    assert generate.span.status.status_code is StatusCode.ERROR
    assert generate.span.status.description == "the worker was stopped"


def in_a_clients_trace(sampled: bool) -> context.Context:
    """As the HTTP shell attaches it."""
    rng = random.Random(1)
    flags = TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT)
    sent = SpanContext(rng.getrandbits(128), rng.getrandbits(64), is_remote=True, trace_flags=flags)
    return trace.set_span_in_context(NonRecordingSpan(sent))


def play_for_client(sampler: Sampler, *, sampled: bool) -> list[Node]:
    async def scenario(mesh: SimulatedMesh) -> None:
        token = context.attach(in_a_clients_trace(sampled))
        try:
            await read(mesh.frontends["frontend-0"], request())
        finally:
            context.detach(token)

    return recorded(scenario, Recorder(sampler))


def test_a_clients_trace_goes_on() -> None:
    (root,) = play_for_client(ParentBased(ALWAYS_OFF), sampled=True)
    assert root.span.parent is not None
    assert root.span.parent.trace_id == context_of(root.span).trace_id
    assert root.all(names.DECODE)


def test_what_is_not_sampled_leaves_no_span_anywhere() -> None:
    assert play_for_client(ParentBased(ALWAYS_OFF), sampled=False) == []

    async def scenario(mesh: SimulatedMesh) -> None:
        await read(mesh.frontends["frontend-0"], request())

    # The root decides; were its decision not passed on, the worker would begin a trace of its own.
    assert recorded(scenario, Recorder(ParentBased(ALWAYS_OFF))) == []


def test_tracing_changes_nothing_else() -> None:
    ask = request(outputs=200)
    seen: list[list[int]] = []

    async def scenario(mesh: SimulatedMesh) -> None:
        seen.append(tokens_of(await read(mesh.frontends["frontend-0"], ask)))
        seen[-1].append(round(asyncio.get_running_loop().time() * 1e9))

    recorded(scenario)
    play(scenario)
    assert seen[0] == seen[1]
