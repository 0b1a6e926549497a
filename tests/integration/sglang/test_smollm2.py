"""The real chat model answers, and goes on as it would have."""

import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from meshift.schemas.requests import FinishReason
from tests.contract.engine_kit import Rig
from tests.integration.sglang.conftest import running
from tests.integration.sglang.generation import check_resumes

MARGIN = 2e-3
"""How far log-probabilities of prefill and decode may be apart."""

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="session")]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def chat(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    async with running(smollm2, tmp_path_factory.mktemp("smollm2"), threads_per_rank=2) as rig:
        yield rig
        await rig.settle()


def chat_prompt(model: Path, question: str) -> list[int]:
    """The question in the model's own chat template."""
    from jinja2 import Environment
    from tokenizers import Tokenizer

    template = Environment().from_string((model / "chat_template.jinja").read_text())
    text = template.render(messages=[{"role": "user", "content": question}], add_generation_prompt=True)
    ids: list[int] = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids
    return ids


async def test_the_capital_of_france(chat: Rig, smollm2: Path, smollm2_text: Callable[[Sequence[int]], str]) -> None:
    prompt = chat_prompt(smollm2, "What is the capital of France?")
    whole = await check_resumes(chat, prompt, cuts=(3,), margin=MARGIN, ignore_eos=False)
    assert "Paris" in smollm2_text(whole.tokens)
    assert whole.finish.reason == FinishReason.STOP
    assert whole.finish.matched_stop == json.loads((smollm2 / "config.json").read_text())["eos_token_id"]


async def test_penalties_against_its_own_repetition(chat: Rig) -> None:
    prompt = [8083, 229] * 8
    plain = await check_resumes(chat, prompt, cuts=(12,), margin=MARGIN, max_new_tokens=24)
    assert len(set(plain.tokens)) < 6, "it was expected to repeat itself"
    penalised = await check_resumes(
        chat, prompt, cuts=(5, 12), margin=MARGIN, max_new_tokens=24, frequency_penalty=0.8, repetition_penalty=1.2
    )
    assert len(set(penalised.tokens)) > 10


async def test_an_answer_that_obeys_a_schema(
    chat: Rig, smollm2: Path, smollm2_text: Callable[[Sequence[int]], str]
) -> None:
    properties = {"country": {"type": "string"}, "capital": {"type": "string"}, "big": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": sorted(properties), "additionalProperties": False}
    prompt = chat_prompt(smollm2, "What is the capital of France? Answer as a JSON object.")
    whole = await check_resumes(
        chat, prompt, cuts=(6,), margin=MARGIN, ignore_eos=False, max_new_tokens=120, json_schema=json.dumps(schema)
    )
    assert whole.finish.reason == FinishReason.STOP
    answer = json.loads(smollm2_text(whole.tokens))
    assert {name: type(value) for name, value in answer.items()} == {"country": str, "capital": str, "big": bool}
