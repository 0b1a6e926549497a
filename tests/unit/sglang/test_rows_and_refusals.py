"""The parts of the SGLang engine that need no SGLang: rows of a step, their way to the worker, refusals."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from meshift.backends.base import EngineRequest
from meshift.backends.sglang import wire
from meshift.backends.sglang.admission import SCHEMA_DEPTH_MAX, RequestLimits, check_request
from meshift.backends.sglang.plugin import outputs
from meshift.backends.sglang.requests import RequestTable
from meshift.schemas.errors import InvalidRequest, Unsupported
from meshift.schemas.identity import RequestKey
from meshift.schemas.requests import Sampling, TokenLogprob

LIMITS = RequestLimits(tokens_max=1000, vocabulary_size=100)
LOAD = wire.LoadSnapshot(
    capacity=10, used=0, cached=0, free=10, reserved=0, running=0, waiting=0, head_demand=0, queued_demand=0,
    step_count=1, submits_seen=0,
)  # fmt: skip


def sglang_request(earlier: int, top: int | None, generated: int) -> Any:
    """What we read of SGLang's request: token i of the whole output has log-probability -i."""
    made = range(earlier, earlier + generated)
    logprob = SimpleNamespace(
        output_token_logprobs_val=[-float(i) for i in made],
        output_top_logprobs_val=[[-float(i + place) for place in range(top)] for i in made] if top else [],
        output_top_logprobs_idx=[[i + place for place in range(top)] for i in made] if top else [],
    )
    return SimpleNamespace(mesh=SimpleNamespace(logprobs=top, earlier=earlier), logprob=logprob)


def expected(i: int, top: int) -> TokenLogprob:
    return TokenLogprob(-float(i), tuple((i + place, -float(i + place)) for place in range(top)))


def test_a_step_arrives_at_the_worker_as_it_was() -> None:
    table, rows = RequestTable(), outputs.StepRows()
    for ticket, (earlier, top) in enumerate([(0, None), (4, 2), (1, 0)], start=1):
        sampling = Sampling(max_new_tokens=9, logprobs=top)
        request = EngineRequest(RequestKey(f"r{ticket}", 1, 0), [1], range(earlier), sampling)
        command = table.open(request, seed=1)
        assert (command.ticket, command.sampling.logprobs) == (ticket, top)
        req = sglang_request(earlier, top, generated=3)
        rows.add(ticket, earlier, (7, 8), None, outputs.logprobs_of(req, earlier, 2))
    report = wire.decode_report(wire.encode(rows.take(5, LOAD)))
    assert isinstance(report, wire.StepReport)
    plain, rich, bare = table.take_step(report)
    assert plain.logprobs is None
    assert rich.logprobs is not None
    assert bare.logprobs is not None
    assert list(rich.logprobs) == [expected(4, 2), expected(5, 2)]
    assert list(bare.logprobs) == [expected(1, 0), expected(2, 0)]
    assert rows.take(6, LOAD).logprobs is None, "a step's rows stay for the next one"


def test_later_tokens_of_a_resumed_request() -> None:
    req = sglang_request(earlier=4, top=1, generated=5)
    given = outputs.logprobs_of(req, 7, 2)
    assert given is not None
    assert list(given) == [expected(7, 1), expected(8, 1)]
    assert outputs.logprobs_of(req, 9, 0) is None


@pytest.mark.parametrize(
    ("start", "count", "retractions", "entry_s", "expected_ns"),
    [
        (4, 1, 0, 2.5, 2_500_000_000),
        (5, 1, 0, 2.5, None),
        (4, 0, 0, 2.5, None),
        (4, 1, 1, 2.5, None),
        (4, 1, 0, 0.0, None),
    ],
    ids=["first tokens", "later ones", "none", "preempted before", "came with its KV"],
)
def test_when_the_prefill_began(
    start: int, count: int, retractions: int, entry_s: float, expected_ns: int | None
) -> None:
    times = SimpleNamespace(forward_entry_time=entry_s)
    req = SimpleNamespace(mesh=SimpleNamespace(earlier=4), retraction_count=retractions, time_stats=times)
    assert outputs.prefill_start_ns(req, start, count) == expected_ns


def test_queueing_reaches_the_worker_with_the_row_it_belongs_to() -> None:
    table, rows = RequestTable(clock_ns=iter([100, 200, 300]).__next__), outputs.StepRows()
    tickets = [
        table.open(EngineRequest(RequestKey(name, 1, 0), [1], (), Sampling(max_new_tokens=9)), seed=1).ticket
        for name in "abc"
    ]
    for ticket, begun_ns in zip(tickets, (None, 250, 290), strict=True):
        rows.add(ticket, 0, (7,), None, None, begun_ns)
    report = wire.decode_report(wire.encode(rows.take(5, LOAD)))
    assert isinstance(report, wire.StepReport)
    assert [event.queued_ns for event in table.take_step(report)] == [None, 50, 0]
    assert rows.take(6, LOAD).prefill_starts_ns == {}, "a step's rows stay for the next one"


@pytest.mark.parametrize("message", ["Failed to compile json grammar: no such type", "something else"])
def test_a_refused_schema_names_its_field(message: str) -> None:
    req = SimpleNamespace(cached_tokens=0, retraction_count=0, mesh=SimpleNamespace(preemption_loss_ns=0))
    row = outputs.finish_row(0, req, {"type": "abort", "message": message}, cancelled=False)
    assert (row.reason, row.message) == ("error", message)
    assert row.param == ("json_schema" if message.startswith("Failed") else None)


@pytest.mark.parametrize(
    "message",
    [
        "Grammar preprocessing timed out: req.grammar_key=('json', '{}')",
        "Failed to compile json grammar: Grammar preprocessing timed out",
    ],
)
def test_a_costly_schema_is_named_without_being_quoted(message: str) -> None:
    req = SimpleNamespace(cached_tokens=0, retraction_count=0, mesh=SimpleNamespace(preemption_loss_ns=0))
    row = outputs.finish_row(0, req, {"type": "abort", "message": message}, cancelled=False)
    assert (row.param, row.message) == ("json_schema", "the schema takes too long to compile; make it simpler")


def nested(depth: int) -> str:
    return '{"items":' * (depth - 1) + "{}" + "}" * (depth - 1)


def request(**sampling: Any) -> EngineRequest:
    return EngineRequest(RequestKey("r", 1, 0), [1], (), Sampling(max_new_tokens=5, **sampling))


@pytest.mark.parametrize("schema", ["{", "[]", "3", '"a"', "", "[" * 60_000, nested(SCHEMA_DEPTH_MAX + 1)])
def test_what_is_no_schema(schema: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        check_request(request(json_schema=schema), LIMITS)
    assert refusal.value.param == "json_schema"


@pytest.mark.parametrize("schema", ["{}", "true", nested(SCHEMA_DEPTH_MAX), json.dumps({"type": "object"})])
def test_what_may_be_a_schema(schema: str) -> None:
    check_request(request(json_schema=schema), LIMITS)


@pytest.mark.parametrize("field", [{"ignore_eos": True}, {"min_new_tokens": 1}])
def test_what_a_schema_decides_itself(field: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        check_request(request(json_schema="{}", **field), LIMITS)
    assert refusal.value.param == next(iter(field))


def test_a_tokenizer_that_allows_no_schemas() -> None:
    limits = RequestLimits(tokens_max=1000, vocabulary_size=100, obeys_schemas=False)
    check_request(request(), limits)
    with pytest.raises(Unsupported) as refusal:
        check_request(request(json_schema="{}"), limits)
    assert refusal.value.param == "json_schema"
