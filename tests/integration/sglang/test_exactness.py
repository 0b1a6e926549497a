"""What a request gives doesn't depend on where, when, or beside whom it is computed."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from meshift.backends.base import EngineRequest
from meshift.backends.sglang.engine import SglangEngine
from meshift.schemas.identity import RequestKey
from meshift.schemas.requests import FinishReason, Sampling
from tests.contract.engine_kit import Rig, conserved, watch_conservation
from tests.integration.sglang.generation import (
    PENALTIES,
    SEEDED,
    TOKENS,
    check_resumes,
    generate,
    results,
    sampling_of,
    submit,
)

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="session")]


# ---- resuming


async def test_resume_at_any_cut(base: Rig) -> None:
    await check_resumes(base, base.prompt(), cuts=(1, 2, 7, 20, 39))


async def test_resume_of_a_long_prompt_in_chunks(base: Rig) -> None:
    whole = await check_resumes(base, base.prompt(700), cuts=(25,), max_new_tokens=50)
    assert len(whole.tokens) == 50


@pytest.mark.parametrize("fields", PENALTIES, ids="+".join)
async def test_resume_with_penalties(base: Rig, fields: dict[str, Any]) -> None:
    prompt = base.prompt()
    whole = await check_resumes(base, prompt, cuts=(1, 4, 13, 30), **fields)
    assert whole.tokens != (await generate(base, prompt)).tokens, "these penalties change nothing"


async def test_resume_below_and_above_min_new_tokens(base: Rig) -> None:
    # So many tokens stop it that it stops soon after they are allowed to.
    stops = tuple(range(0, base.info.model.vocabulary_size, 4))
    fields: dict[str, Any] = {"stop_token_ids": stops, "min_new_tokens": 15, "ignore_eos": False, "max_new_tokens": 200}
    prompt = base.prompt()
    whole = await generate(base, prompt, **fields)
    assert whole.finish.reason == FinishReason.STOP
    assert 16 <= len(whole.tokens) < 200
    cuts = sorted({1, 10, 14, len(whole.tokens) - 1})
    await check_resumes(base, prompt, cuts, **fields)


async def test_resume_with_biases(base: Rig) -> None:
    prompt = base.prompt()
    undisturbed = (await generate(base, prompt)).tokens
    unwanted, wanted = set(undisturbed), next(token for token in range(9, 99) if token not in undisturbed)
    never: dict[str, Any] = {"logit_bias": tuple((token, -100.0) for token in sorted(unwanted))}
    whole = await check_resumes(base, prompt, cuts=(1, 13, 39), **never)
    assert not unwanted & set(whole.tokens)
    only = await check_resumes(base, prompt, cuts=(7,), logit_bias=((wanted, 100.0),))
    assert only.tokens == [wanted] * TOKENS
    beside = submit(base, prompt), submit(base, prompt, **never), submit(base, base.prompt(), temperature=1.0, seed=1)
    free, biased, _ = await results(base, *beside)
    assert (free.tokens, biased.tokens) == (undisturbed, whole.tokens)


async def test_resume_before_a_stop_token(base: Rig) -> None:
    prompt = base.prompt()
    undisturbed = (await generate(base, prompt)).tokens
    stop = undisturbed[25]
    at = undisturbed.index(stop)
    fields: dict[str, Any] = {"stop_token_ids": (stop,), "ignore_eos": False}
    whole = await check_resumes(base, prompt, cuts=(at // 2 + 1, at), **fields)
    assert whole.finish.matched_stop == stop
    assert whole.tokens == undisturbed[: at + 1]


async def test_resume_inside_a_stop_string(base: Rig, smollm2_text: Callable[[Sequence[int]], str]) -> None:
    prompt = base.prompt()
    undisturbed = (await generate(base, prompt)).tokens
    text = smollm2_text(undisturbed[20:23])
    whole = await generate(base, prompt, stop=(text,))
    assert whole.finish.reason == FinishReason.STOP
    assert whole.finish.matched_stop == text
    assert len(whole.tokens) == 23
    await check_resumes(base, prompt, cuts=(10, 21, 22), stop=(text,))


async def test_resume_of_what_was_complete(base: Rig) -> None:
    """An owner may end between its last token and its finish."""
    prompt = base.prompt()
    undisturbed = (await generate(base, prompt)).tokens
    steps = base.engine.load().step_count
    by_length = await generate(base, prompt, undisturbed)
    assert (by_length.tokens, by_length.finish.reason) == ([], FinishReason.LENGTH)
    stop = undisturbed[-1]
    by_stop = await generate(
        base, prompt, undisturbed, stop_token_ids=(stop,), ignore_eos=False, max_new_tokens=TOKENS + 10
    )
    assert (by_stop.tokens, by_stop.finish.reason) == ([], FinishReason.STOP)
    assert by_stop.finish.matched_stop == stop
    assert base.engine.load().step_count == steps


# ---- seeds


@pytest.mark.parametrize("fields", SEEDED, ids="+".join)
async def test_a_seed_decides(base: Rig, fields: dict[str, Any]) -> None:
    prompt = base.prompt()
    whole = await check_resumes(base, prompt, cuts=(1, 17), **fields)
    others = [submit(base, base.prompt(), temperature=1.0, top_p=0.95, seed=number) for number in range(3)]
    crowded = submit(base, prompt, **fields)
    others += [submit(base, base.prompt(), temperature=0.0), submit(base, base.prompt(), temperature=1.2)]
    await results(base, crowded, *others)
    assert crowded.tokens == whole.tokens
    assert (await generate(base, prompt, **fields | {"seed": 99})).tokens != whole.tokens
    assert len(set(whole.tokens)) > 5


async def test_without_a_seed_it_is_random(base: Rig) -> None:
    prompt = base.prompt()
    first, second = [await generate(base, prompt, temperature=1.0) for _ in range(2)]
    assert first.tokens != second.tokens


# ---- pressure


async def test_preempted_requests_lose_nothing_but_time(base: Rig) -> None:
    wrong = watch_conservation(base)
    prompts = [base.prompt(120) for _ in range(8)]
    kinds = [{}, PENALTIES[3], SEEDED[1], PENALTIES[0]]
    # SGLang reserves room for all of the output of requests that ignore the end of text.
    common = {"max_new_tokens": 80, "ignore_eos": False}
    fields = [kinds[index % len(kinds)] | common for index in range(8)]
    alone = [await generate(base, prompt, **kind) for prompt, kind in zip(prompts, fields, strict=True)]
    streams = []
    for prompt, kind in zip(prompts, fields, strict=True):
        # One after the other: what arrives together is admitted with all its output to come.
        streams.append(submit(base, prompt, **kind))
        await base.produced(streams[-1], 1)
    together = await results(base, *streams)
    assert [result.tokens for result in together] == [result.tokens for result in alone]
    preempted = [result.finish for result in together if result.finish.preemptions]
    assert preempted, "the pool is too large for this test"
    assert all(finish.preemption_loss_ns > 0 for finish in preempted)
    assert all(result.finish.preemption_loss_ns == 0 for result in alone)
    assert wrong == []


async def test_the_longest_request_runs(base: Rig) -> None:
    longest = base.info.model.context_tokens_max
    prompt = base.prompt(longest - 8)
    result = await generate(base, prompt, max_new_tokens=8)
    assert (len(result.tokens), result.finish.reason) == (8, FinishReason.LENGTH)
    earlier = base.prompt(longest - 60)
    rest = await generate(base, base.prompt(40), earlier, max_new_tokens=longest - 40)
    assert (len(rest.tokens), rest.finish.reason) == (20, FinishReason.LENGTH)


async def test_cancels_at_every_stage_under_load(base: Rig) -> None:
    wrong = watch_conservation(base)
    sizes = [base.random.choice((5, 60, 700, 1100)) for _ in range(24)]
    streams = [submit(base, base.prompt(size), max_new_tokens=base.random.randrange(1, 90)) for size in sizes]
    keys = [key for key, stream in base.listener.streams.items() if any(stream is mine for mine in streams)]
    for key in base.random.sample(keys, len(keys) - 4):
        base.engine.cancel(key)
        await asyncio.sleep(base.random.choice((0.0, 0.01, 0.05)))
        assert conserved(base)
    finishes = [result.finish for result in await results(base, *streams)]
    assert {finish.reason for finish in finishes} <= {FinishReason.CANCELLED, FinishReason.LENGTH}
    assert sum(finish.reason == FinishReason.CANCELLED for finish in finishes) >= 10
    assert wrong == []


async def test_a_greater_priority_goes_first(base: Rig) -> None:
    blocker = submit(base, base.prompt(700), max_new_tokens=40)
    await base.produced(blocker, 1)
    assert isinstance(base.engine, SglangEngine)
    engine, order, held = base.engine, list[int](), list[list[int | None]]()
    requests = [base.request(base.prompt(600), max_new_tokens=2, priority=priority) for priority in (0, 2, 1)]
    streams = [base.submit(request) for request in requests]

    def note_finishes() -> None:
        ended = [index for index, stream in enumerate(streams) if stream.finish is not None]
        order.extend(index for index in ended if index not in order)
        held.append([engine.held_tokens(request.key) for request in requests])

    base.listener.hooks.append(note_finishes)
    await base.finished(blocker, *streams)
    assert order == [1, 2, 0]
    assert [0, 0, 0] in held, "the engine says who waits"
    assert any(tokens is not None and tokens > 600 for row in held for tokens in row)


@pytest.mark.soak
async def test_what_waits_for_what_others_may_come_to_is_told_of(base: Rig) -> None:
    """Its prompt would fit many times; SGLang wants room for all of its output."""
    runs = submit(base, base.prompt(100), max_new_tokens=900)
    await base.produced(runs, 1)
    assert not base.engine.load().batch_full
    waits = submit(base, base.prompt(100), max_new_tokens=1050)
    await base.eventually(lambda: base.engine.load().batch_full, "a full batch")
    load = base.engine.load()
    assert (load.running, load.waiting, waits.tokens) == (1, 1, [])
    assert load.free + load.cached > 5 * load.head_demand
    for key, stream in list(base.listener.streams.items()):
        if stream is runs:
            base.engine.cancel(key)
    await base.produced(waits, 1)
    assert not base.engine.load().batch_full


async def test_prefix_cache_is_reported(base: Rig) -> None:
    prompt = base.prompt(64)
    cold = await generate(base, prompt)
    warm = await generate(base, prompt)
    assert (cold.finish.cached_tokens, warm.finish.cached_tokens) == (0, 63)
    assert cold.tokens == warm.tokens


async def test_what_only_sglang_refuses_ends_with_an_error(base: Rig) -> None:
    unchecked = Sampling.model_construct(**(sampling_of().model_dump() | {"min_p": 2.0}))
    stream = base.submit(EngineRequest(RequestKey("refused", 1, 0), base.prompt(), (), unchecked))
    (result,) = await results(base, stream)
    assert (result.tokens, result.finish.reason) == ([], FinishReason.ERROR)
    assert "min_p" in result.finish.message


async def test_attempts_of_one_request_are_apart(base: Rig) -> None:
    """SGLang ends by prefix of its request id; ours must not be mixed up."""
    keys = [RequestKey("r", 1, 1), RequestKey("r", 1, 10), RequestKey("r", 11, 1), RequestKey("r/1.1;", 1, 1)]
    prompt = base.prompt()
    streams = [base.listener.open(key, 0) for key in keys]
    for key in keys:
        base.engine.submit(EngineRequest(key, prompt, (), sampling_of(max_new_tokens=60)))
    await base.produced(streams[0], 1)
    base.engine.cancel(keys[0])
    await base.finished(*streams)
    reasons = [stream.finish.reason for stream in streams if stream.finish is not None]
    assert reasons == [FinishReason.CANCELLED] + 3 * [FinishReason.LENGTH]
