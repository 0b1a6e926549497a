"""Log-probabilities and output that obeys a JSON schema, undisturbed, cut and resumed, on one stage and on two."""

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from meshift.backends.base import EngineRequest
from meshift.schemas.errors import InvalidRequest
from meshift.schemas.identity import RequestKey
from meshift.schemas.requests import FinishReason, TokenLogprob
from tests.contract.engine_kit import Rig
from tests.integration.sglang.conftest import running
from tests.integration.sglang.generation import check_resumes, generate, results, sampling_of, submit

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="session")]

TOLERANCE = 1e-4
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "people": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["town", "village"]},
    },
    "required": ["city", "people", "kind"],
    "additionalProperties": False,
}
CONSTRAINED: dict[str, Any] = {"json_schema": json.dumps(SCHEMA), "ignore_eos": False, "max_new_tokens": 200}


@pytest.fixture(scope="module")
def text_of(smollm2: Path) -> Any:
    """Token ids to text, without special tokens."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(smollm2 / "tokenizer.json")).decode


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def staged_engine(random_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    log_dir = tmp_path_factory.mktemp("staged")
    async with running(random_llama, log_dir, pipeline_stages=2, layer_partition=(5, 3)) as rig:
        yield rig


@pytest_asyncio.fixture(loop_scope="session")
async def staged(staged_engine: Rig) -> AsyncIterator[Rig]:
    """Two stages, left idle and whole by each test."""
    yield staged_engine
    await staged_engine.settle()


def check_close(given: Sequence[TokenLogprob], expected: Sequence[TokenLogprob]) -> None:
    """The same tokens, and values within the tolerance."""
    assert len(given) == len(expected)
    for one, other in zip(given, expected, strict=True):
        assert one.value == pytest.approx(other.value, abs=TOLERANCE)
        assert [logprob for _, logprob in one.top] == pytest.approx(
            [logprob for _, logprob in other.top], abs=TOLERANCE
        )


def check_object(text: str) -> None:
    """It obeys `SCHEMA`. Not strictly: xgrammar lets control characters into strings of bounded length, which only a
    random model uses."""
    value = json.loads(text, strict=False)
    assert set(value) == {"city", "people", "kind"}
    assert isinstance(value["city"], str)
    assert len(value["city"]) <= 12
    assert 0 <= value["people"] <= 999
    assert value["kind"] in ("town", "village")


async def check_logprobs(rig: Rig, prompt: Sequence[int], **fields: Any) -> list[TokenLogprob]:
    """Those of a resumed request are those of the whole one from the cut on."""
    stream = submit(rig, prompt, logprobs=3, **fields)
    await rig.finished(stream)
    for cut in (1, 11, len(stream.tokens) - 1):
        rest = submit(rig, prompt, stream.tokens[:cut], logprobs=3, **fields)
        await rig.finished(rest)
        assert rest.tokens == stream.tokens[cut:]
        check_close(rest.logprobs, stream.logprobs[cut:])
    return stream.logprobs


async def test_logprobs_are_those_of_the_tokens(base: Rig) -> None:
    prompt = base.prompt()
    logprobs = await check_logprobs(base, prompt)
    tokens = (await generate(base, prompt)).tokens
    assert [logprob.top[0][0] for logprob in logprobs] == tokens, "greedy takes the likeliest"
    for logprob in logprobs:
        assert len(logprob.top) == 3
        assert logprob.top[0][1] == logprob.value < 0
        assert list(logprob.top) == sorted(logprob.top, key=lambda pair: -pair[1])


async def test_logprobs_of_long_and_sampled_requests(base: Rig) -> None:
    await check_logprobs(base, base.prompt(700))
    await check_logprobs(base, base.prompt(), temperature=0.8, top_p=0.9, seed=5)
    await check_logprobs(base, base.prompt(), repetition_penalty=0.7, stop=("zz",))


async def test_logprobs_beside_others(base: Rig) -> None:
    prompt = base.prompt()
    alone = submit(base, prompt, logprobs=2)
    await base.finished(alone)
    beside = [submit(base, prompt, logprobs=top) for top in (2, 0, None)] + [submit(base, base.prompt(), logprobs=20)]
    await base.finished(*beside)
    check_close(beside[0].logprobs, alone.logprobs)
    assert [logprob.top for logprob in beside[1].logprobs] == [()] * len(alone.tokens)
    assert beside[2].logprobs == []
    assert {len(logprob.top) for logprob in beside[3].logprobs} == {20}


async def test_preempted_requests_keep_their_logprobs(base: Rig) -> None:
    fields: dict[str, Any] = {"max_new_tokens": 80, "ignore_eos": False, "logprobs": 1}
    prompts = [base.prompt(120) for _ in range(8)]
    streams = []
    for prompt in prompts:
        streams.append(submit(base, prompt, **fields))
        await base.produced(streams[-1], 1)
    together = await results(base, *streams)
    assert any(result.finish.preemptions for result in together), "the pool is too large for this test"
    for prompt, stream in zip(prompts, streams, strict=True):
        alone = submit(base, prompt, **fields)
        await base.finished(alone)
        check_close(stream.logprobs, alone.logprobs)


async def test_a_schema_is_obeyed_and_resumed(base: Rig, text_of: Any) -> None:
    prompt = base.prompt()
    whole = await check_resumes(base, prompt, (1, 5, 9), **CONSTRAINED)
    assert whole.finish.reason == FinishReason.STOP
    check_object(text_of(whole.tokens))
    await check_resumes(base, prompt, (len(whole.tokens) - 1, len(whole.tokens)), **CONSTRAINED)
    sampled = await check_resumes(base, prompt, (3, 8), **CONSTRAINED | {"temperature": 1.0, "seed": 4})
    check_object(text_of(sampled.tokens))


async def test_schemas_beside_free_requests(base: Rig, text_of: Any) -> None:
    prompt = base.prompt()
    alone = await generate(base, prompt)
    other = json.dumps({"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 3})
    free, object_, array_ = await results(
        base,
        submit(base, prompt),
        submit(base, prompt, **CONSTRAINED, logprobs=2),
        submit(base, prompt, **CONSTRAINED | {"json_schema": other}),
    )
    assert free.tokens == alone.tokens
    check_object(text_of(object_.tokens))
    assert len(json.loads(text_of(array_.tokens))) == 3


@pytest.mark.parametrize("schema", ["{", "[]", '"a"', json.dumps({"a": [[]] * 2}).replace("[]", "[" * 200 + "]" * 200)])
async def test_what_is_no_schema_is_refused_at_once(base: Rig, schema: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        submit(base, base.prompt(), json_schema=schema, ignore_eos=False)
    assert refusal.value.param == "json_schema"
    assert base.idle()


async def test_what_cant_be_compiled_ends_with_the_field(base: Rig) -> None:
    for schema in ({"type": "nonsense"}, {"type": "array", "uniqueItems": True}, {"type": "nonsense"}):
        result = await generate(base, base.prompt(), **CONSTRAINED | {"json_schema": json.dumps(schema)})
        assert (result.tokens, result.finish.reason) == ([], FinishReason.ERROR)
        assert result.finish.param == "json_schema"


async def test_earlier_output_that_breaks_the_schema(base: Rig) -> None:
    result = await generate(base, base.prompt(), base.prompt(4), **CONSTRAINED)
    assert (result.tokens, result.finish.reason) == ([], FinishReason.ERROR)


async def test_cancelled_while_the_schema_is_compiled(base: Rig) -> None:
    words = [f"word {number} {base.random.random()}" for number in range(400)]
    schema = json.dumps({"type": "object", "properties": {word: {"type": "string"} for word in words}})
    steps = base.engine.load().step_count
    keys = [RequestKey(f"compile-{number}", 1, 0) for number in range(3)]
    sampling = sampling_of(**CONSTRAINED | {"json_schema": schema})
    streams = [base.submit(EngineRequest(key, base.prompt(), (), sampling)) for key in keys]
    await base.eventually(lambda: base.engine.load().waiting == 3, "requests that wait")
    for key in keys:
        base.engine.cancel(key)
    assert {result.finish.reason for result in await results(base, *streams)} == {FinishReason.CANCELLED}
    await base.eventually(base.idle, "an idle engine")
    assert base.engine.load().step_count == steps, "a cancelled request ran"


async def test_two_stages(base: Rig, staged: Rig, text_of: Any) -> None:
    prompt = base.prompt()
    check_close(await check_logprobs(staged, prompt), await check_logprobs(base, prompt))
    ours = await check_resumes(staged, prompt, (5,), **CONSTRAINED)
    assert ours.tokens == (await generate(base, prompt, **CONSTRAINED)).tokens
    check_object(text_of(ours.tokens))
    streams = [submit(staged, staged.prompt(), **CONSTRAINED, logprobs=1) for _ in range(6)]
    for result in await results(staged, *streams):
        check_object(text_of(result.tokens))
    await staged.engine.check_integrity()
