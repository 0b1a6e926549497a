"""The worker's request table."""

import pytest

from meshift.schemas.base import pack_tokens
from meshift.schemas.errors import InvalidRequest, Stale
from meshift.schemas.identity import FrontendRef, Owner, RequestKey
from meshift.schemas.requests import Finish, FinishReason, Sampling, Submit
from meshift.services.worker import requests as module
from meshift.services.worker.requests import RequestTable

OWNER = Owner(instance_id="a", incarnation=1)
FRONTEND = FrontendRef(frontend_id="f", incarnation=1)
DONE = Finish(reason=FinishReason.STOP)


def submission(attempt: int = 1, request_id: str = "r", output: tuple[int, ...] = ()) -> Submit:
    return Submit(
        request_id=request_id,
        attempt=attempt,
        owner=OWNER,
        frontend=FRONTEND,
        prompt=pack_tokens([1]),
        output=pack_tokens(output),
        sampling=Sampling(max_new_tokens=8),
    )


def key(attempt: int = 1, hop: int = 0) -> RequestKey:
    return RequestKey("r", attempt, hop)


def test_a_repeated_submission_is_not_new() -> None:
    table = RequestTable(60.0)
    assert table.check_new(submission().key)
    table.add(submission(), 0)
    assert not table.check_new(submission().key)


def test_an_older_attempt_is_stale_and_a_newer_one_supersedes() -> None:
    table = RequestTable(60.0)
    table.add(submission(2), 0)
    with pytest.raises(Stale):
        table.check_new(submission(1).key)
    assert table.check_new(submission(3).key)
    older = table.add(submission(3), 0)
    assert older is not None
    assert older.key == key(2)
    assert older.muted
    assert table.get(key(2)) is older, "the engine may still give events of it"
    assert table.running() == 2
    table.engine_ended(older)
    assert table.running() == 1
    assert table.get(key(2)) is None


def test_a_closed_request_does_not_come_back() -> None:
    table = RequestTable(60.0)
    table.add(submission(), 0)
    assert table.close(key(), 0.0) is not None
    with pytest.raises(Stale):
        table.check_new(submission().key)
    assert table.check_new(submission(2).key)


def test_a_cancel_that_overtakes_its_submission() -> None:
    table = RequestTable(60.0)
    assert table.close(key(), 0.0) is None
    with pytest.raises(Stale):
        table.check_new(submission().key)


def test_a_late_cancel_of_an_old_attempt_spares_the_new_one() -> None:
    table = RequestTable(60.0)
    table.add(submission(2), 0)
    assert table.close(key(1), 0.0) is None
    assert table.get(key(2)) is not None


def test_closing_a_finished_request_needs_no_cancel() -> None:
    table = RequestTable(60.0)
    table.add(submission(), 0)
    record = table.get(key())
    assert record is not None
    record.finish = DONE
    assert table.unacknowledged() == [record]
    assert table.close(key(), 0.0) is None
    assert len(table) == 0


def test_tombstones_end(monkeypatch: pytest.MonkeyPatch) -> None:
    table = RequestTable(10.0)
    table.close(key(), 0.0)
    table.forget_tombstones(9.0)
    with pytest.raises(Stale):
        table.check_new(submission().key)
    table.forget_tombstones(10.0)
    assert table.check_new(submission().key)
    monkeypatch.setattr(module, "TOMBSTONES_MAX", 2)
    for index in range(5):
        table.close(RequestKey(f"r{index}", 1, 0), 0.0)
    assert table.check_new(submission(request_id="r2").key)
    with pytest.raises(Stale):
        table.check_new(submission(request_id="r4").key)


def test_tokens_are_indexed_in_the_whole_output() -> None:
    table = RequestTable(60.0)
    table.add(submission(2, output=(5, 6)), 2)
    record = table.get(key(2))
    assert record is not None
    record.output.extend([7, 8])
    assert list(record.tokens_from(3)) == [8]
    assert list(record.tokens_from(4)) == []
    for start in (1, 5):
        with pytest.raises(InvalidRequest):
            record.tokens_from(start)


def test_discard_takes_back_an_add() -> None:
    table = RequestTable(60.0)
    table.add(submission(), 0)
    table.discard(key())
    assert len(table) == 0
    assert table.check_new(submission().key)
