"""The matrix that every pair of real engines must pass: all ways to sample, moved at random, under load."""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from meshift.schemas.requests import FinishReason
from tests.contract.engine_kit import MovePair, movable
from tests.integration.sglang.generation import PENALTIES, SEEDED
from tests.integration.sglang.moving import Journey, check_equal, travel, under_load, undisturbed

SEEDS = (1, pytest.param(2, marks=pytest.mark.soak), pytest.param(3, marks=pytest.mark.soak))
MOVES_MAX = 4
TOKENS = 80
KINDS: list[dict[str, Any]] = [
    {},
    {"logprobs": 3},
    {"logprobs": 2, "temperature": 1.0, "seed": 8},
    {"min_new_tokens": 60, "ignore_eos": False},
    {"logit_bias": ((17, 6.0), (400, -3.0)), "temperature": 1.0, "seed": 4},
    *SEEDED,
]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 30}, "people": {"type": "integer", "maximum": 99999}},
    "required": ["city", "people"],
    "additionalProperties": False,
}


class JourneySuite:
    """Needs the fixture `pair: MovePair`, which calls `settle` afterwards, and `text_of`. `penalties` says whether both
    engines count tokens for penalties at the same time."""

    penalties = True

    @pytest.mark.parametrize("seed", SEEDS)
    async def test_all_ways_to_sample(self, pair: MovePair, seed: int) -> None:
        chance = random.Random(seed)
        kinds = [*KINDS, *(PENALTIES if self.penalties else ())]
        prompts = [pair.source.prompt(chance.randrange(2, 70)) for _ in kinds]
        expected = [
            await undisturbed(pair.source, prompt, max_new_tokens=TOKENS, **kind)
            for prompt, kind in zip(prompts, kinds, strict=True)
        ]
        moves = 0
        for low in range(0, len(kinds), 4):
            some = range(low, min(low + 4, len(kinds)))
            journeys = await under_load(
                pair,
                *(travel(pair, chance, prompts[i], MOVES_MAX, max_new_tokens=TOKENS, **kinds[i]) for i in some),
            )
            for i, journey in zip(some, journeys, strict=True):
                what = f"seed {seed}: {kinds[i]} after {journey.moves} moves"
                check_equal(journey, expected[i], prompts[i], what, **kinds[i])
                moves += journey.moves
        print(f"seed {seed}: {moves} moves of {len(kinds)} requests")
        assert moves >= len(kinds)

    @pytest.mark.parametrize("seed", SEEDS)
    async def test_stop_strings_across_the_cut(
        self, pair: MovePair, seed: int, text_of: Callable[[Sequence[int]], str]
    ) -> None:
        chance, prompt = random.Random(seed), pair.source.prompt(20)
        plain = await undisturbed(pair.source, prompt, max_new_tokens=TOKENS)
        text = text_of(plain.tokens[12:42])
        # As long as nobody knows whether it will be the stop string, the tokens are held back.
        fields: dict[str, Any] = {"max_new_tokens": TOKENS, "stop": (text[2 : len(text) - 2],)}
        expected = await undisturbed(pair.source, prompt, **fields)
        journeys = await under_load(pair, *(travel(pair, chance, prompt, MOVES_MAX, **fields) for _ in range(2)))
        for journey in journeys:
            check_equal(journey, expected, prompt, f"seed {seed}: {journey.moves} moves", **fields)
        assert sum(journey.moves for journey in journeys) > 0

    @pytest.mark.parametrize("seed", SEEDS)
    async def test_schemas_across_the_cut(
        self, pair: MovePair, seed: int, text_of: Callable[[Sequence[int]], str]
    ) -> None:
        chance, prompt = random.Random(seed), pair.source.prompt(20)
        fields: dict[str, Any] = {
            "max_new_tokens": 200,
            "json_schema": json.dumps(SCHEMA),
            "ignore_eos": False,
            "temperature": 1.0,
            "seed": seed,
        }
        expected = await undisturbed(pair.source, prompt, **fields)
        # The first time it is new there, the second time known.
        for _ in range(2):
            await movable(pair.destination).learn_schema(fields["json_schema"])
        journeys = await under_load(pair, *(travel(pair, chance, prompt, MOVES_MAX, **fields) for _ in range(2)))
        for journey in journeys:
            check_equal(journey, expected, prompt, f"seed {seed}: {journey.moves} moves", **fields)
            check_object(text_of, journey)
        assert sum(journey.moves for journey in journeys) > 0


def check_object(text_of: Callable[[Sequence[int]], str], journey: Journey) -> None:
    """The output is what the schema says, if it wasn't cut by its length."""
    if journey.finish is not None and journey.finish.reason is FinishReason.STOP:
        value = json.loads(text_of(journey.tokens), strict=False)
        assert set(value) == {"city", "people"}
