"""Journeys: requests that move to and fro between two engines while both work, compared with undisturbed ones."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from meshift.backends.base import EngineRequest, MoveRefused, Refusal
from meshift.schemas.requests import Finish, TokenLogprob
from tests.contract.engine_kit import MovePair, Mover, Rig, Stream
from tests.integration.sglang.generation import sampling_of, scored
from tests.integration.sglang.near_ties import MARGIN, Given, check_same

ROUNDS = {"live": 1, "rounds": 3, "blocking": 0}
RECOMPUTE = "recompute"
WAYS = (*ROUNDS, RECOMPUTE)
STAY_TOKENS_MAX = 12
"""How many tokens a request makes at a place before it moves on, at most."""

LOAD_REQUESTS = 2
LOAD_TOKENS = 60


@dataclass
class Journey:
    """What all places together gave of a request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None
    moves: int = 0
    exact_until: int | None = None
    """From this index on sums may have been taken in another order; None: nowhere."""

    def take(self, stream: Stream) -> None:
        """A place has given this."""
        self.tokens += stream.tokens
        self.logprobs += stream.logprobs
        self.finish = stream.finish
        if stream.finish is not None and stream.finish.preemptions:
            self.exact_until = 0

    def differs_from_now_on(self) -> None:
        """Sums may be taken in another order."""
        if self.exact_until is None:
            self.exact_until = len(self.tokens)


def new_request(rig: Rig, prompt: Sequence[int], **fields: Any) -> EngineRequest:
    """Of these sampling fields, under a new id."""
    plain = rig.request(prompt)
    return EngineRequest(plain.key, prompt, (), sampling_of(**fields), plain.priority)


async def undisturbed(rig: Rig, prompt: Sequence[int], **fields: Any) -> Journey:
    """The same request, alone and at one place."""
    stream = rig.submit(new_request(rig, prompt, **scored(fields)))
    await rig.finished(stream)
    journey = Journey()
    journey.take(stream)
    return journey


async def travel(pair: MovePair, chance: random.Random, prompt: Sequence[int], moves: int, **fields: Any) -> Journey:
    """Run a request from the source on, and move it up to so many times."""
    journey, request = Journey(), new_request(pair.source, prompt, **scored(fields))
    other_sums = pair.source.info.tensor_ranks != pair.destination.info.tensor_ranks
    stream = pair.source.submit(request)
    for _ in range(moves):
        await pair.source.produced(stream, chance.randrange(1, STAY_TOKENS_MAX))
        mover = Mover(pair, request)
        way = chance.choice(WAYS)
        try:
            request, after = await _move(mover, way)
        except MoveRefused as refused:
            if refused.refusal in (Refusal.BROKEN, Refusal.INCOMPATIBLE):
                raise
            await _give_up(mover, stream)
            if stream.finish is not None:
                break
            continue
        journey.take(stream)
        journey.moves += 1
        if way == RECOMPUTE or other_sums:
            journey.differs_from_now_on()
        stream, pair = after, pair.reversed()
    await pair.source.finished(stream)
    journey.take(stream)
    return journey


async def _move(mover: Mover, way: str) -> tuple[EngineRequest, Stream]:
    """In one of `WAYS`."""
    if way == RECOMPUTE:
        return await mover.run_state_only()
    begun = await mover.begin()
    for _ in range(ROUNDS[way]):
        await mover.reserve(max(mover.next, len(begun.tokens)) + mover.pair.headroom)
        await mover.copy()
    return await mover.finish()


async def _give_up(mover: Mover, stream: Stream) -> None:
    """What a mesh does after a refusal: end both halves. The request may have ended."""
    destination, source = mover.pair.destination.engine, mover.pair.source.engine
    await destination.abort(mover.key)  # type: ignore[attr-defined]
    await source.resume(mover.key, mover.key.attempt)  # type: ignore[attr-defined]
    await asyncio.sleep(0)


async def under_load(pair: MovePair, *journeys: Any) -> list[Journey]:
    """Journeys side by side, while both engines have other work; that must come out right as well."""
    others = [
        (rig, rig.request(max_new_tokens=LOAD_TOKENS))
        for rig in (pair.source, pair.destination)
        for _ in range(LOAD_REQUESTS)
    ]
    streams = [rig.submit(request) for rig, request in others]
    outcomes = await asyncio.gather(*journeys, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    made = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
    for rig in (pair.source, pair.destination):
        await rig.finished(*(stream for (at, _), stream in zip(others, streams, strict=True) if at is rig))
    for index in (0, -1):
        rig, request = others[index]
        alone = await rig.generate(rig.request(request.prompt, max_new_tokens=LOAD_TOKENS))
        assert streams[index].tokens == alone, "a neighbour was disturbed"
    return made


def check_equal(moved: Journey, expected: Journey, prompt: Sequence[int], what: object, **fields: Any) -> None:
    """The same tokens, log-probabilities and end. Where KV was moved only, and between engines that take sums in the
    same order, nothing may differ; from where something was computed anew, near ties may."""
    same = check_same(
        Given(expected.tokens, expected.logprobs),
        Given(moved.tokens, moved.logprobs),
        sampling_of(**fields),
        len(prompt),
        what,
        exact_until=len(expected.tokens) + 1 if moved.exact_until is None else moved.exact_until,
    )
    if not same:
        return
    assert moved.finish is not None
    assert expected.finish is not None
    assert (moved.finish.reason, moved.finish.matched_stop) == (expected.finish.reason, expected.finish.matched_stop)
    for one, other in zip(moved.logprobs, expected.logprobs, strict=True):
        assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top], abs=MARGIN), what
