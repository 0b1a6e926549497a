"""What the exactness tests ask of an engine."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from meshift.backends.base import EngineRequest
from meshift.schemas.identity import RequestKey
from meshift.schemas.requests import Finish, Sampling, TokenLogprob
from tests.contract.engine_kit import Rig, Stream
from tests.integration.sglang.near_ties import MARGIN, Given, check_same

TOKENS = 40
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Result:
    """A finished stream."""

    tokens: list[int]
    finish: Finish
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def given(self) -> Given:
        """To be compared."""
        return Given(self.tokens, self.logprobs)


def sampling_of(**fields: Any) -> Sampling:
    """Greedy and endless, with changes."""
    return Sampling(**{"max_new_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True, **fields})


def submit(rig: Rig, prompt: Sequence[int], output: Sequence[int] = (), **fields: Any) -> Stream:
    """Submit under a new id."""
    key = RequestKey(f"exact-{next(_numbers)}", 1, 0)
    return rig.submit(EngineRequest(key, prompt, output, sampling_of(**fields)))


async def results(rig: Rig, *streams: Stream) -> list[Result]:
    """Wait for all."""
    await rig.finished(*streams)
    return [Result(stream.tokens, stream.finish, stream.logprobs) for stream in streams if stream.finish is not None]


async def generate(rig: Rig, prompt: Sequence[int], output: Sequence[int] = (), **fields: Any) -> Result:
    """One request, alone."""
    (result,) = await results(rig, submit(rig, prompt, output, **fields))
    return result


async def check_resumes(
    rig: Rig, prompt: Sequence[int], cuts: Sequence[int], *, margin: float = MARGIN, **fields: Any
) -> Result:
    """Cut after each of `cuts` tokens, a request goes on as if it had not been cut; returns the uncut one. A prefill
    computes what decode steps have computed, in other sums: where tokens differ it must be a near tie."""
    fields = scored(fields)
    whole = await generate(rig, prompt, **fields)
    for cut in cuts:
        assert cut <= len(whole.tokens)
        rest = await generate(rig, prompt, whole.tokens[:cut], **fields)
        what = f"cut after {cut}: {fields}"
        expected, known = whole.given.since(cut), len(prompt) + cut
        if not check_same(expected, rest.given, sampling_of(**fields), known, what, margin=margin):
            continue
        assert (rest.finish.reason, rest.finish.matched_stop) == (whole.finish.reason, whole.finish.matched_stop)
    return whole


def scored(fields: dict[str, Any]) -> dict[str, Any]:
    """With log-probabilities, by which near ties are known."""
    return {"logprobs": 0, **fields}


PENALTIES: list[dict[str, Any]] = [
    {"frequency_penalty": -1.0},
    {"presence_penalty": -2.0},
    {"repetition_penalty": 0.5},
    {"frequency_penalty": -0.3, "presence_penalty": -0.3, "repetition_penalty": 0.9, "min_new_tokens": 30},
]
"""Rewards of repetition: what a request gives depends on each token that it gave before. (A random model doesn't
repeat itself unless rewarded.)"""


SEEDED: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "top_p": 0.9, "seed": 2**63 - 1},
    {"temperature": 1.3, "top_k": 20, "seed": -5},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.8, "min_p": 0.02, "seed": 3},
]
"""Sampling fields of each way through the sampler."""

KINDS = [{}, *PENALTIES, *SEEDED]

TIES_MAX = 2
"""Of some hundreds of tokens; more is no chance."""

PROMPT_SEED = 11
"""Of the prompts that two engines are compared with."""


async def compare(rig: Rig, other: Rig) -> None:
    """Two engines give the same: each way to sample, several requests together, and cut in the middle. What is in a
    step together, and how it is cut between ranks, differs between them, and with it the order of sums."""
    # The same prompts in whatever order tests run.
    chance = random.Random(PROMPT_SEED)
    sizes = (3, 40, 17, 600, 5, 25, 80, 30, 12)
    prompts = [[chance.randrange(*rig.token_range) for _ in range(size)] for size in sizes]
    kinds = [scored(kind) for kind in KINDS]
    ours, theirs = [
        await results(engine, *(submit(engine, prompt, **kind) for prompt, kind in zip(prompts, kinds, strict=True)))
        for engine in (rig, other)
    ]
    cut = TOKENS // 3
    rests = await results(
        other,
        *(
            submit(other, prompt, result.tokens[:cut], **kind)
            for prompt, result, kind in zip(prompts, ours, kinds, strict=True)
        ),
    )
    ties = 0
    for kind, prompt, mine, its, rest in zip(kinds, prompts, ours, theirs, rests, strict=True):
        sampling, known = sampling_of(**kind), len(prompt)
        ties += not check_same(mine.given, its.given, sampling, known, kind)
        ties += not check_same(mine.given.since(cut), rest.given, sampling, known + cut, f"cut: {kind}")
    assert ties <= TIES_MAX
