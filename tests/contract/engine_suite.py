"""What every engine must do, for a fake one in virtual time and for a real one that takes minutes to start.

An engine's own test module inherits the suites and gives the fixture `rig` and, for `engine_move_suite`, the fixture
`pair`: started engines with their listeners. One engine may serve all tests of a session; its fixture calls
`settle()` after each test. Waiting is for conditions, with deadlines on the running loop's clock.
"""

import asyncio

import pytest

from meshift.schemas.errors import ContextTooLong, InvalidRequest
from meshift.schemas.identity import RequestKey
from meshift.schemas.requests import FinishReason
from tests.contract.engine_kit import POLL_S, Rig, watch_conservation, watch_loads


class EngineStreamSuite:
    """What depends on how an engine steps: for each way to step. Needs the fixture `rig: Rig`, which calls `Rig.settle`
    afterwards."""

    async def test_tokens_come_in_order_and_end_once(self, rig: Rig) -> None:
        stream = rig.submit(rig.request())
        await rig.finished(stream)
        assert len(stream.tokens) == rig.output_tokens
        assert stream.finish is not None
        assert stream.finish.reason == FinishReason.LENGTH
        assert all(0 <= token < rig.info.model.vocabulary_size for token in stream.tokens)

    async def test_stop_token_ends_it(self, rig: Rig) -> None:
        prompt = rig.prompt()
        undisturbed = await rig.generate(rig.request(prompt))
        at = undisturbed.index(undisturbed[len(undisturbed) // 2])
        stream = rig.submit(rig.request(prompt, stop_token_ids=(undisturbed[at],), ignore_eos=False))
        await rig.finished(stream)
        assert stream.tokens == undisturbed[: at + 1]
        assert stream.finish is not None
        assert stream.finish.reason == FinishReason.STOP
        assert stream.finish.matched_stop == undisturbed[at]

    async def test_many_at_once_are_each_as_alone(self, rig: Rig) -> None:
        wrong = watch_conservation(rig)
        prompts = [rig.prompt(1 + rig.random.randrange(2 * rig.prompt_tokens)) for _ in range(rig.concurrency)]
        together = [rig.submit(rig.request(prompt)) for prompt in prompts]
        await rig.finished(*together)
        for index in rig.random.sample(range(rig.concurrency), 2):
            assert together[index].tokens == await rig.generate(rig.request(prompts[index]))
        assert all(len(stream.tokens) == rig.output_tokens for stream in together)
        assert wrong == []

    async def test_resume_goes_on_exactly(self, rig: Rig) -> None:
        prompt = rig.prompt()
        undisturbed = await rig.generate(rig.request(prompt))
        for count in {1, len(undisturbed) // 2, len(undisturbed) - 1}:
            stream = rig.submit(rig.request(prompt, output=undisturbed[:count]))
            await rig.finished(stream)
            assert stream.tokens == undisturbed[count:], f"after {count} tokens"
            assert stream.finish is not None
            assert stream.finish.reason == FinishReason.LENGTH

    async def test_cancel_while_running(self, rig: Rig) -> None:
        before = rig.engine.load()
        long = rig.request(max_new_tokens=rig.long_tokens)
        stream = rig.submit(long)
        await rig.produced(stream, 1)
        rig.engine.cancel(long.key)
        await rig.finished(stream)
        assert stream.finish is not None
        assert stream.finish.reason == FinishReason.CANCELLED
        await rig.eventually(rig.idle, "the memory of a cancelled request")
        assert rig.engine.load().capacity == before.capacity

    async def test_cancel_before_the_first_token(self, rig: Rig) -> None:
        requests = [rig.request(max_new_tokens=rig.long_tokens) for _ in range(rig.concurrency)]
        streams = [rig.submit(request) for request in requests]
        for request in requests:
            rig.engine.cancel(request.key)
        await rig.finished(*streams)
        assert {stream.finish.reason for stream in streams if stream.finish} == {FinishReason.CANCELLED}

    async def test_cancel_racing_the_finish(self, rig: Rig) -> None:
        for count in range(1, rig.output_tokens + 1):
            request = rig.request()
            stream = rig.submit(request)
            await rig.produced(stream, count)
            rig.engine.cancel(request.key)
            await rig.finished(stream)
            assert stream.finish is not None
            whole = len(stream.tokens) == rig.output_tokens
            assert stream.finish.reason in ({FinishReason.LENGTH, FinishReason.CANCELLED} if whole else {"cancelled"})

    async def test_cancel_inside_the_listener(self, rig: Rig) -> None:
        request = rig.request(max_new_tokens=rig.long_tokens)
        stream = rig.listener.open(request.key, 0)
        rig.listener.hooks.append(lambda: rig.engine.cancel(request.key) if stream.tokens else None)
        rig.engine.submit(request)
        await rig.finished(stream)
        assert stream.finish is not None
        assert stream.finish.reason == FinishReason.CANCELLED

    async def test_load_follows_the_requests(self, rig: Rig) -> None:
        wrong, loads = watch_conservation(rig), watch_loads(rig)
        assert rig.idle()
        steps, prefilled = rig.engine.load().step_count, rig.engine.load().prefill_tokens
        streams = [rig.submit(rig.request()) for _ in range(rig.concurrency)]
        await rig.finished(*streams)
        await rig.eventually(rig.idle, "an idle engine")
        assert wrong == []
        assert rig.engine.load().step_count > steps
        # Less where prompts share a cached prefix; a preempted one is computed twice.
        assert rig.engine.load().prefill_tokens - prefilled >= rig.concurrency
        assert 1 <= max(load.running for load in loads) <= rig.concurrency
        assert max(load.used for load in loads) >= rig.prompt_tokens
        counts = [load.step_count for load in loads]
        assert counts == sorted(counts)

    async def test_load_counts_the_queue(self, rig: Rig) -> None:
        wrong, loads = watch_conservation(rig), watch_loads(rig)
        # Two of these don't fit together, so that all but one wait (unless the context is shorter than that).
        size = max(1, min(rig.info.capacity // 2 + 1, rig.info.model.context_tokens_max - 2))
        count = rig.info.capacity // size + 2
        streams = [rig.submit(rig.request(rig.prompt(size), max_new_tokens=2)) for _ in range(count)]
        await rig.finished(*streams)
        assert wrong == []
        assert max(load.running for load in loads) >= 1
        assert max(load.waiting for load in loads) >= 1
        for load in loads:
            assert load.running + load.waiting <= count
            assert load.head_demand >= size or not load.waiting
            assert load.queued_demand >= load.waiting * size
            assert load.running * size <= load.used


class EngineGenerationSuite(EngineStreamSuite):
    """All of it."""

    async def test_one_token(self, rig: Rig) -> None:
        stream = rig.submit(rig.request(max_new_tokens=1))
        await rig.finished(stream)
        assert len(stream.tokens) == 1

    async def test_same_prompt_same_tokens(self, rig: Rig) -> None:
        prompt = rig.prompt()
        assert await rig.generate(rig.request(prompt)) == await rig.generate(rig.request(prompt))
        other = await rig.generate(rig.request(rig.prompt()))
        assert len(other) == rig.output_tokens

    # ---- resuming with tokens of an earlier attempt

    async def test_resume_after_a_cancel(self, rig: Rig) -> None:
        prompt = rig.prompt()
        undisturbed = await rig.generate(rig.request(prompt))
        first = rig.request(prompt)
        begun = rig.submit(first)
        await rig.produced(begun, 2)
        rig.engine.cancel(first.key)
        await rig.finished(begun)
        if len(begun.tokens) < rig.output_tokens:
            rest = await rig.generate(rig.request(prompt, output=tuple(begun.tokens)))
            assert begun.tokens + rest == undisturbed

    # ---- log-probabilities

    async def test_logprobs_for_those_who_ask(self, rig: Rig) -> None:
        prompt = rig.prompt()
        plain, bare, rich = [rig.submit(rig.request(prompt, logprobs=top)) for top in (None, 0, 3)]
        await rig.finished(plain, bare, rich)
        assert plain.tokens == bare.tokens == rich.tokens
        assert plain.logprobs == []
        assert [logprob.top for logprob in bare.logprobs] == [()] * rig.output_tokens
        assert [len(logprob.top) for logprob in rich.logprobs] == [3] * rig.output_tokens
        assert all(logprob.value <= 0 for logprob in rich.logprobs)
        for logprob in rich.logprobs:
            values = [value for _, value in logprob.top]
            assert values == sorted(values, reverse=True)

    async def test_a_resumed_request_gives_logprobs_of_new_tokens_only(self, rig: Rig) -> None:
        whole = rig.submit(rig.request(logprobs=2, prompt=(prompt := rig.prompt())))
        await rig.finished(whole)
        for cut in (1, rig.output_tokens - 1):
            rest = rig.submit(rig.request(prompt, output=whole.tokens[:cut], logprobs=2))
            await rig.finished(rest)
            assert rest.tokens == whole.tokens[cut:]
            for given, expected in zip(rest.logprobs, whole.logprobs[cut:], strict=True):
                assert given.value == pytest.approx(expected.value, abs=1e-4)

    # ---- cancelling

    async def test_cancel_twice_ends_once(self, rig: Rig) -> None:
        request = rig.request(max_new_tokens=rig.long_tokens)
        stream = rig.submit(request)
        await rig.produced(stream, 1)
        rig.engine.cancel(request.key)
        rig.engine.cancel(request.key)
        await rig.finished(stream)
        rig.engine.cancel(request.key)
        await rig.generate(rig.request())

    async def test_cancel_of_an_unknown_key_is_ignored(self, rig: Rig) -> None:
        rig.engine.cancel(RequestKey("nobody", 1, 0))
        request = rig.request()
        stream = rig.submit(request)
        rig.engine.cancel(request.key._replace(attempt=2))
        rig.engine.cancel(request.key._replace(hop=1))
        await rig.finished(stream)
        assert stream.finish is not None
        assert stream.finish.reason == FinishReason.LENGTH

    # ---- load

    async def test_first_tokens_tell_how_long_it_queued(self, rig: Rig) -> None:
        clock = asyncio.get_running_loop().time
        began_s = clock()
        # Two of these don't fit together: each waits for the one before it.
        size = max(1, min(rig.info.capacity // 2 + 1, rig.info.model.context_tokens_max - 4))
        streams = [rig.submit(rig.request(rig.prompt(size), max_new_tokens=4)) for _ in range(3)]
        await rig.finished(*streams)
        took_ns = (clock() - began_s) * 1e9
        queued_ns = [stream.queued_ns for stream in streams if stream.queued_ns is not None]
        assert len(queued_ns) == 3
        assert 0 <= queued_ns[0] < queued_ns[2] <= took_ns
        resumed = rig.submit(rig.request(rig.prompt(), output=rig.prompt()[:1]))
        await rig.finished(resumed)
        assert resumed.queued_ns is not None

    # ---- refusals

    async def test_too_long_a_prompt(self, rig: Rig) -> None:
        limit = min(rig.info.capacity, rig.info.model.context_tokens_max)
        with pytest.raises(ContextTooLong):
            rig.submit(rig.request(rig.prompt(limit + 1), max_new_tokens=1))
        half = limit // 2 + 1
        with pytest.raises(ContextTooLong):
            rig.submit(rig.request(rig.prompt(half), output=rig.prompt(half), max_new_tokens=half + 1))
        assert rig.idle()

    async def test_an_empty_prompt(self, rig: Rig) -> None:
        with pytest.raises(InvalidRequest):
            rig.submit(rig.request([]))
        assert rig.idle()

    async def test_token_ids_outside_the_vocabulary(self, rig: Rig) -> None:
        for token in (-1, rig.info.model.vocabulary_size):
            with pytest.raises(InvalidRequest):
                rig.submit(rig.request([*rig.prompt(), token]))
        assert rig.idle()

    async def test_a_key_is_submitted_once(self, rig: Rig) -> None:
        request = rig.request()
        stream = rig.submit(request)
        with pytest.raises(InvalidRequest):
            rig.engine.submit(request)
        await rig.finished(stream)
        with pytest.raises(InvalidRequest):
            rig.engine.submit(request)
        assert len(stream.tokens) == rig.output_tokens


class EngineStopSuite:
    """Needs the fixture `rig: Rig` with an engine of its own, which the test stops."""

    async def test_stop_is_idempotent_and_silent(self, rig: Rig) -> None:
        streams = [rig.submit(rig.request(max_new_tokens=rig.long_tokens)) for _ in range(2)]
        await rig.produced(streams[0], 1)
        await rig.engine.stop(rig.timeout_s)
        calls = rig.listener.calls
        await rig.engine.stop(rig.timeout_s)
        rig.engine.cancel(next(iter(rig.listener.streams)))
        await asyncio.sleep(20 * POLL_S)
        assert rig.listener.calls == calls
        assert rig.listener.failures == []
        assert rig.listener.problems == []
