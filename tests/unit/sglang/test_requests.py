"""The worker's table of requests."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from meshift.backends.base import ClassUsage, EngineRequest
from meshift.backends.sglang import requests, wire
from meshift.backends.sglang.requests import ProtocolViolation, RequestTable
from meshift.schemas.base import pack_tokens
from meshift.schemas.errors import InvalidRequest
from meshift.schemas.identity import RequestKey
from meshift.schemas.requests import FinishReason, Priority, Sampling


def request(name: str, prompt: Sequence[int] = (1, 2, 3), output: Sequence[int] = ()) -> EngineRequest:
    return EngineRequest(
        RequestKey(name, 1, 0), prompt, output, Sampling(max_new_tokens=9, stop=("x",), logit_bias=((4, -1.5),))
    )


def load(submits_seen: int, waiting: int = 0, demand: int = 0) -> wire.LoadSnapshot:
    return wire.LoadSnapshot(
        capacity=100, used=10, cached=20, free=70, reserved=0, running=1, waiting=waiting, head_demand=demand,
        queued_demand=demand, step_count=5, submits_seen=submits_seen,
    )  # fmt: skip


def step(*rows: tuple[int, int, Sequence[int]], finished: Sequence[int] = ()) -> wire.StepReport:
    return wire.StepReport(
        iteration=1,
        tickets=[ticket for ticket, _, _ in rows],
        starts=[start for _, start, _ in rows],
        counts=[len(tokens) for _, _, tokens in rows],
        tokens=b"".join(pack_tokens(tokens) for _, _, tokens in rows),
        finishes=[
            wire.FinishRow(
                row=row, reason="length", matched_stop=None, message="", param=None, cached_tokens=2, preemptions=1,
                preemption_loss_ns=7,
            )
            for row in finished
        ],
        logprobs=None,
        load=load(0),
    )  # fmt: skip


def test_command() -> None:
    command = RequestTable().open(request("a", output=(7,)), seed=5)
    assert wire.decode_rid(command.rid) == RequestKey("a", 1, 0)
    assert (command.prompt, command.output) == (pack_tokens((1, 2, 3)), pack_tokens((7,)))
    assert (command.sampling.seed, command.sampling.stop) == (5, ["x"])
    assert command.sampling.logit_bias == {"4": -1.5}


def test_events_of_a_step() -> None:
    table = RequestTable()
    one, two = (table.open(request(name, output=output), 0).ticket for name, output in (("a", ()), ("b", (4, 4))))
    events = table.take_step(step((two, 2, [8]), (one, 0, [5, 6]), finished=[1]))
    assert [(event.key.request_id, event.start, list(event.tokens)) for event in events] == [
        ("b", 2, [8]),
        ("a", 0, [5, 6]),
    ]
    assert events[0].finish is None
    assert events[1].finish is not None
    assert events[1].finish.reason is FinishReason.LENGTH
    assert (events[1].finish.cached_tokens, events[1].finish.preemptions) == (2, 1)
    assert RequestKey("a", 1, 0) not in table
    assert len(table) == 1
    assert [event.start for event in table.take_step(step((two, 3, [])))] == [3]


@pytest.mark.parametrize("start", [0, 2])
def test_gap_or_repetition(start: int) -> None:
    table = RequestTable()
    ticket = table.open(request("a"), 0).ticket
    table.take_step(step((ticket, 0, [1])))
    with pytest.raises(ProtocolViolation):
        table.take_step(step((ticket, start, [1])))


def test_events_after_the_finish() -> None:
    table = RequestTable()
    ticket = table.open(request("a"), 0).ticket
    table.take_step(step((ticket, 0, []), finished=[0]))
    with pytest.raises(ProtocolViolation):
        table.take_step(step((ticket, 0, [1])))


def test_a_key_comes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "ENDED_KEYS_MAX", 2)
    table = RequestTable()
    tickets = [table.open(request(name), 0).ticket for name in "abc"]
    with pytest.raises(InvalidRequest):
        table.open(request("a"), 0)
    for ticket in tickets:
        table.take_step(step((ticket, 0, []), finished=[0]))
    with pytest.raises(InvalidRequest):
        table.open(request("c"), 0)
    # The memory of ended keys is bounded.
    table.open(request("a"), 0)


def test_load_counts_what_the_ranks_have_not_seen() -> None:
    table = RequestTable()
    for name, output in (("a", ()), ("b", (4, 4)), ("c", ())):
        table.open(request(name, output=output), 0)
    unseen = table.load(load(0))
    assert (unseen.waiting, unseen.head_demand, unseen.queued_demand) == (3, 3, 11)
    assert unseen.used + unseen.cached + unseen.free + unseen.reserved == unseen.capacity
    partly = table.load(load(1, waiting=1, demand=3))
    assert (partly.waiting, partly.head_demand, partly.queued_demand) == (3, 3, 11)
    none_left = table.load(load(3))
    assert (none_left.waiting, none_left.head_demand, none_left.queued_demand) == (0, 0, 0)


def test_what_each_holds() -> None:
    """What was preempted waits, too, and has given tokens."""
    names, table = ("runs", "new", "preempted", "deep"), RequestTable()
    runs, new, preempted, _ = (table.open(request(name), 0) for name in names)
    table.take_step(step((runs.ticket, 0, [5, 6]), (preempted.ticket, 0, [5])))
    seen = msgspec.structs.replace(load(4, waiting=3), waiting_rids=[new.rid, preempted.rid])
    held = {name: table.held_tokens(RequestKey(name, 1, 0), seen) for name in (*names, "no")}
    assert held == {"runs": 5, "new": 0, "preempted": 0, "deep": None, "no": None}
    assert table.held_tokens(RequestKey("preempted", 1, 0), load(4)) == 4, "it runs again"


def test_usage_by_class() -> None:
    """What is in its prefill belongs to a class only where there is no other one."""
    table = RequestTable()
    table.open(request("low"), 0)
    assert table.load(load(1)).usages == (ClassUsage(0, 1, 10),), "the ranks' figures"
    urgent = msgspec.structs.replace(load(2), running=2)
    high = replace(request("high"), priority=Priority(execution=3))
    table.take_step(step((table.open(high, 0).ticket, 0, [5])))
    assert table.load(urgent).usages == (ClassUsage(3, 1, 4),), "the other one is in its prefill"


def test_withdrawn() -> None:
    table = RequestTable()
    table.open(request("a"), 0)
    table.open(request("b"), 0)
    table.withdraw(RequestKey("b", 1, 0))
    assert RequestKey("b", 1, 0) not in table
    assert table.load(load(0)).waiting == 1
    table.open(request("b"), 0)
