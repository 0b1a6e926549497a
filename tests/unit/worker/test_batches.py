"""Messages of one step: log-probabilities of those rows that asked, and no message too large."""

import pytest

from meshift.schemas.base import pack_tokens, unpack_tokens
from meshift.schemas.identity import FrontendRef, Owner
from meshift.schemas.logprobs import Logprobs, unpack_logprobs
from meshift.schemas.requests import Finish, FinishReason, Sampling, Submit, TokenBatch
from meshift.services.worker import batches
from meshift.services.worker import requests as requests_module
from meshift.services.worker.batches import BatchBuilder
from meshift.services.worker.requests import RequestRecord, RequestTable

OWNER = Owner(instance_id="a", incarnation=1)
DONE = Finish(reason=FinishReason.STOP)


def record_of(request_id: str, count: int, logprobs: int | None, base: int = 0) -> RequestRecord:
    """A request that has given tokens 0, 1, ... and log-probabilities -0, -1, ..."""
    table = RequestTable(60.0)
    submit = Submit(
        request_id=request_id, attempt=1, owner=OWNER, frontend=FrontendRef(frontend_id="f", incarnation=1),
        prompt=pack_tokens([1]), sampling=Sampling(max_new_tokens=1000, logprobs=logprobs),
    )  # fmt: skip
    table.add(submit, base)
    record = table.get(submit.key)
    assert record is not None
    record.output.extend(range(count))
    if record.logprobs is not None and logprobs is not None:
        for number in range(count):
            record.logprobs.append(-float(number), [(number + place, -float(place)) for place in range(logprobs)])
    return record


def build(*rows: tuple[RequestRecord, int]) -> TokenBatch:
    """Each record's tokens from that index of its own on."""
    builder = BatchBuilder()
    for record, first in rows:
        builder.add(record, record.base + first, record.output[first:])
    return builder.build(OWNER, 1)


def test_only_rows_that_asked() -> None:
    plain, bare, rich = record_of("p", 3, None), record_of("b", 2, 0, base=7), record_of("r", 3, 2)
    batch = build((plain, 0), (bare, 1), (rich, 1))
    assert batch.counts == (3, 1, 2)
    assert batch.starts == (0, 8, 1)
    assert batch.logprobs is not None
    assert bare.logprobs is not None
    assert rich.logprobs is not None
    assert unpack_logprobs(batch.logprobs) == {1: bare.logprobs[1:], 2: rich.logprobs[1:]}
    assert build((plain, 0)).logprobs is None


def test_a_repeated_finish_has_none() -> None:
    record = record_of("r", 3, 2)
    record.finish = DONE
    batch = build((record, 3))
    assert batch.logprobs is None
    assert batch.finishes[0].finish == DONE


def test_a_row_too_large_is_left_to_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "LOGPROB_MESSAGE_BYTES_MAX", 5 * Logprobs.token_bytes(2))
    small, large, plain = record_of("s", 3, 2), record_of("l", 4, 2), record_of("p", 4, None)
    large.finish = DONE
    batch = build((small, 0), (large, 0), (plain, 0))
    assert batch.counts == (3, 0, 4)
    assert batch.starts == (0, 4, 0)
    assert batch.logprobs is not None
    assert batch.logprobs.rows == (0,)
    assert list(unpack_tokens(batch.tokens)) == [0, 1, 2, 0, 1, 2, 3]


def test_a_replay_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests_module, "LOGPROB_MESSAGE_BYTES_MAX", 5 * Logprobs.token_bytes(2) + 1)
    record = record_of("r", 9, 2, base=4)
    record.finish = DONE
    assert record.logprobs is not None
    assert record.replay_from(5) == (record.output[1:6], record.logprobs[1:6], None)
    assert record.replay_from(10) == (record.output[6:], record.logprobs[6:], DONE)
    plain = record_of("p", 900, None)
    plain.finish = DONE
    assert plain.replay_from(1) == (plain.output[1:], None, DONE)
