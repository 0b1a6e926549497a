"""The stream state machine: exactly once, whatever order events come in."""

import random
from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshift.schemas.errors import InternalError, InvalidRequest
from meshift.schemas.identity import FrontendRef, Owner, RequestKey
from meshift.schemas.logprobs import Logprobs
from meshift.schemas.moves import Fence, FenceVerdict
from meshift.schemas.requests import Finish, FinishReason, Sampling
from meshift.services.frontend.api import GenerateRequest
from meshift.services.frontend.streams import (
    REORDER_ROWS_MAX,
    TRANSITIONS,
    Stream,
    StreamEvent,
    StreamState,
    Verdict,
)

A = Owner(instance_id="a", incarnation=1)
B = Owner(instance_id="b", incarnation=1)
DONE = Finish(reason=FinishReason.LENGTH)


def new_stream(running: bool = True) -> Stream:
    stream = Stream(GenerateRequest("r", "m", [1, 2, 3], Sampling(max_new_tokens=100)))
    if running:
        stream.begin_attempt(A, 0.0)
        stream.enter(StreamEvent.ACCEPTED)
    return stream


@pytest.mark.parametrize("state", list(StreamState))
@pytest.mark.parametrize("event", list(StreamEvent))
def test_every_pair_of_the_table(state: StreamState, event: StreamEvent) -> None:
    stream = new_stream(running=False)
    stream.state = state
    if (state, event) in TRANSITIONS:
        stream.enter(event)
        assert stream.state is TRANSITIONS[state, event]
    else:
        with pytest.raises(InternalError, match=str(event)):
            stream.enter(event)
        assert stream.state is state


def test_ended_states_are_final() -> None:
    ended = {StreamState.FINISHED, StreamState.FAILED, StreamState.CANCELLED}
    assert not ended & {state for state, _ in TRANSITIONS}


@given(st.integers(0, 2**32), st.integers(1, 60))
def test_any_order_and_repetition_gives_the_tokens_once(seed: int, count: int) -> None:
    rng = random.Random(seed)
    tokens = [rng.randrange(1000) for _ in range(count)]
    rows = []
    start = 0
    while start < count:
        size = rng.randint(1, min(5, count - start))
        rows.append((start, tokens[start : start + size], DONE if start + size == count else None))
        start += size
    sent = rows + [row for row in rows if rng.random() < 0.3]
    rng.shuffle(sent)
    stream = new_stream()
    for row in sent:
        if not stream.ended:
            stream.take(*row, now_s=1.0)
    assert list(stream.output) == tokens
    assert stream.finish == DONE
    assert stream.state is StreamState.FINISHED


@given(st.integers(0, 2**32))
def test_overlapping_rows_are_trimmed(seed: int) -> None:
    rng = random.Random(seed)
    tokens = list(range(30))
    stream = new_stream()
    while len(stream.output) < 30:
        start = rng.randint(0, len(stream.output))
        end = rng.randint(start, 30)
        stream.take(start, array("i", tokens[start:end]), None, now_s=0.0)
    assert list(stream.output) == tokens


def test_a_gap_waits_and_is_shown() -> None:
    stream = new_stream()
    assert not stream.take(2, [3], DONE, now_s=0.0)
    assert stream.has_gap
    assert not stream.ended
    assert stream.take(0, [1, 2], None, now_s=0.0)
    assert list(stream.output) == [1, 2, 3]
    assert stream.ended
    assert not stream.has_gap


def test_the_reorder_buffer_is_bounded() -> None:
    stream = new_stream()
    for start in range(1, REORDER_ROWS_MAX + 10):
        stream.take(start, [start], None, now_s=0.0)
    stream.take(0, [0], None, now_s=0.0)
    assert list(stream.output) == list(range(REORDER_ROWS_MAX + 1))


def test_verdicts() -> None:
    stream = new_stream()
    assert stream.judge(1, 0, A) is Verdict.CURRENT
    assert stream.judge(1, 0, B) is Verdict.STALE
    assert stream.judge(1, 0, Owner(instance_id="a", incarnation=2)) is Verdict.STALE
    assert stream.judge(1, 1, B) is Verdict.NEWER_HOP
    assert stream.judge(0, 0, A) is Verdict.STALE
    assert stream.judge(2, 0, A) is Verdict.STALE


def test_a_move_hands_over_and_the_old_owner_may_finish_its_part() -> None:
    stream = new_stream()
    stream.take(0, [1], None, now_s=0.0)
    stream.adopt(1, B, 3, 1.0)
    assert stream.judge(1, 1, B) is Verdict.CURRENT
    assert stream.judge(1, 0, A) is Verdict.FORMER
    assert stream.judge(1, 0, B) is Verdict.STALE
    assert stream.judge(1, 1, A) is Verdict.STALE
    stream.take(3, [4], None, now_s=1.0)
    assert list(stream.output) == [1]
    # What lies behind the move isn't the old owner's to say.
    assert stream.take_former(1, [2, 3, 99, 99])
    assert list(stream.output) == [1, 2, 3, 4]
    assert not stream.take_former(4, [99])
    assert not stream.take_former(0, [99])
    assert list(stream.output) == [1, 2, 3, 4]


def test_the_former_owner_is_asked_first_and_once() -> None:
    stream = new_stream()
    stream.take(0, [1], None, now_s=0.0)
    assert stream.whom_to_ask() == (RequestKey("r", 1, 0), A)
    stream.adopt(1, B, 3, 1.0)
    assert stream.whom_to_ask() == (RequestKey("r", 1, 0), A)
    assert stream.former is not None
    stream.former.asked = True
    assert stream.whom_to_ask() == (RequestKey("r", 1, 1), B)
    stream.former.asked = False
    stream.take_former(1, [2, 3])
    assert stream.whom_to_ask() == (RequestKey("r", 1, 1), B)


def test_a_request_that_moves_before_its_submission_is_answered_runs() -> None:
    stream = new_stream(running=False)
    stream.begin_attempt(A, 0.0)
    stream.adopt(1, B, 0, 1.0)
    assert stream.state is StreamState.RUNNING
    stream.enter(StreamEvent.OWNER_LOST)
    assert stream.given_up
    # It had moved on from there.
    stream.adopt(2, A, 0, 1.0)
    assert stream.state is StreamState.RUNNING
    assert not stream.given_up


def fence(attempt: int = 1, hop: int = 1, source: Owner = A, destination: Owner = B) -> Fence:
    return Fence(
        request_id="r",
        attempt=attempt,
        hop=hop,
        source=source,
        destination=destination,
        frontend=FrontendRef(frontend_id="f", incarnation=1),
    )


def test_a_fence_before_the_new_owner_spoke_raises_the_attempt() -> None:
    stream = new_stream()
    stream.take(0, [1], None, now_s=0.0)
    assert stream.fence(fence(), 1.0) is FenceVerdict.RAISED
    assert (stream.key, stream.owner) == (RequestKey("r", 2, 0), A)
    # The same question again gets the same answer; whom it was about is stale.
    assert stream.fence(fence(), 2.0) is FenceVerdict.RAISED
    assert stream.key == RequestKey("r", 2, 0)
    assert stream.judge(1, 1, B) is Verdict.STALE
    assert stream.judge(1, 0, A) is Verdict.STALE
    assert stream.judge(2, 0, A) is Verdict.CURRENT
    stream.enter(StreamEvent.OWNER_LOST)
    stream.begin_attempt(A, 3.0)
    assert stream.fence(fence(), 4.0) is FenceVerdict.GONE


def test_a_fence_after_the_new_owner_spoke_confirms_it() -> None:
    stream = new_stream()
    stream.adopt(1, B, 0, 1.0)
    assert stream.fence(fence(), 1.0) is FenceVerdict.MOVED
    stream.adopt(2, A, 0, 1.0)
    assert stream.fence(fence(), 1.0) is FenceVerdict.MOVED
    assert stream.key == RequestKey("r", 1, 2)


C = Owner(instance_id="c", incarnation=1)


@pytest.mark.parametrize("asked", [fence(attempt=2), fence(hop=2), fence(source=B), fence(source=C, destination=A)])
def test_a_fence_of_somebody_else_is_answered_gone(asked: Fence) -> None:
    stream = new_stream()
    assert stream.fence(asked, 1.0) is FenceVerdict.GONE
    stream.adopt(1, C, 0, 1.0)
    assert stream.fence(fence(), 1.0) is FenceVerdict.GONE
    stream.enter(StreamEvent.CANCEL)
    assert stream.fence(fence(destination=C), 1.0) is FenceVerdict.GONE


def test_a_fence_for_an_owner_that_was_given_up_is_answered_gone() -> None:
    stream = new_stream()
    stream.enter(StreamEvent.OWNER_LOST)
    assert stream.fence(fence(), 1.0) is FenceVerdict.GONE


def test_a_fence_may_overtake_the_answer_to_the_submission() -> None:
    stream = new_stream(running=False)
    stream.begin_attempt(A, 0.0)
    assert stream.fence(fence(), 1.0) is FenceVerdict.RAISED
    assert stream.state is StreamState.RUNNING


def test_a_new_attempt_forgets_what_came_early() -> None:
    stream = new_stream()
    stream.take(0, [1], None, now_s=0.0)
    stream.take(5, [99], None, now_s=0.0)
    stream.enter(StreamEvent.OWNER_LOST)
    stream.begin_attempt(B, 1.0)
    assert not stream.has_gap
    stream.take(1, [2], None, now_s=1.0)
    assert list(stream.output) == [1, 2]
    assert stream.judge(1, 0, A) is Verdict.STALE


def test_the_finish_may_overtake_the_answer_to_the_submission() -> None:
    stream = new_stream(running=False)
    stream.begin_attempt(A, 0.0)
    assert stream.take(0, [7], DONE, now_s=0.0)
    assert stream.state is StreamState.FINISHED


def test_an_engine_error_fails_the_stream() -> None:
    stream = new_stream()
    assert stream.take(0, [], Finish(reason=FinishReason.ERROR, message="out of memory"), now_s=0.0)
    assert stream.state is StreamState.FAILED
    assert stream.error is not None
    assert "out of memory" in stream.error.message


def test_a_finish_without_tokens_counts() -> None:
    stream = new_stream()
    stream.take(0, [1], None, now_s=0.0)
    assert stream.take(1, [], DONE, now_s=0.0)
    assert stream.state is StreamState.FINISHED


# ---- log-probabilities


def logprob_stream(top: int = 1) -> Stream:
    stream = Stream(GenerateRequest("r", "m", [1, 2, 3], Sampling(max_new_tokens=100, logprobs=top)))
    stream.begin_attempt(A, 0.0)
    stream.enter(StreamEvent.ACCEPTED)
    return stream


def logprobs_of(tokens: Sequence[int], top: int = 1) -> Logprobs:
    """A function of each token, so that one beside the wrong token shows."""
    made = Logprobs(top)
    for token in tokens:
        made.append(-token / 7, [(token + place, -token / 7 - place) for place in range(top)])
    return made


@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(0, 3))
def test_logprobs_stay_beside_their_tokens(seed: int, count: int, top: int) -> None:
    """Overlapping rows in any order, some lost, and a new owner now and then."""
    rng = random.Random(seed)
    tokens = [rng.randrange(1000) for _ in range(count)]
    stream = logprob_stream(top)
    while len(stream.output) < count:
        start = rng.randint(max(0, len(stream.output) - 5), min(count - 1, len(stream.output) + 5))
        row = array("i", tokens[start : start + rng.randint(0, 6)])
        stream.take(start, row, None, 0.0, logprobs_of(row, top))
        if rng.random() < 0.1:
            stream.enter(StreamEvent.OWNER_LOST)
            stream.begin_attempt(rng.choice((A, B)), 0.0)
            stream.enter(StreamEvent.ACCEPTED)
    assert list(stream.output) == tokens
    assert stream.logprobs == logprobs_of(tokens, top)


def test_tokens_without_the_logprobs_that_were_asked_for_fail_the_stream() -> None:
    for given_ in (None, logprobs_of([5, 6], top=2), logprobs_of([5])):
        stream = logprob_stream()
        assert stream.take(0, [5, 6], None, 0.0, given_)
        assert stream.state is StreamState.FAILED
        assert not stream.output


def test_a_finish_without_tokens_needs_no_logprobs() -> None:
    stream = logprob_stream()
    stream.take(0, [5], None, 0.0, logprobs_of([5]))
    assert stream.take(1, [], DONE, 0.0)
    assert stream.state is StreamState.FINISHED


def test_what_the_caller_can_mend_is_named() -> None:
    stream = new_stream()
    refusal = Finish(reason=FinishReason.ERROR, message="no such type", param="json_schema")
    assert stream.take(0, [], refusal, now_s=0.0)
    assert isinstance(stream.error, InvalidRequest)
    assert stream.error.param == "json_schema"
