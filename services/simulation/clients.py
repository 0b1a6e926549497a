"""Clients of a simulated mesh: they ask as apps do, try again where an app would, and keep what they got."""

import asyncio
import random
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from meshift.schemas.errors import OverloadError, PeerError
from meshift.schemas.requests import Finish, Priority, Sampling, TokenLogprob
from meshift.services.frontend.api import GenerateRequest
from meshift.services.frontend.core import FrontendCore
from meshift.services.simulation.workload import Arrival

PROMPT_TOKENS = range(30_000)


@dataclass(slots=True)
class Outcome:
    """What one request gave its client. Times are of the loop's clock."""

    request: GenerateRequest
    arrival_s: float
    first_s: float | None = None
    last_s: float | None = None
    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: list[TokenLogprob] | None = None
    finish: Finish | None = None
    tries: int = 0
    attempts: int = 0
    owners: list[str] = field(default_factory=list)
    """The instances that it ran on, one after another, as its client's reads found them."""
    moves: int = 0
    """Within the last attempt."""
    pause_s_max: float = 0.0
    """Longest time between two chunks."""


def make_request(arrival: Arrival, model: str, rng: random.Random, logprobs: int | None = None) -> GenerateRequest:
    """Random token ids in, exactly as many out as the workload says."""
    prompt = array("i", rng.choices(PROMPT_TOKENS, k=arrival.input_tokens))
    sampling = Sampling(max_new_tokens=arrival.output_tokens, temperature=0.0, ignore_eos=True, logprobs=logprobs)
    priority = Priority(scheduling=arrival.priority, execution=arrival.priority)
    return GenerateRequest(arrival.request_id, model, prompt, sampling, priority)


class FrontendDied(Exception):
    """The client's connection broke."""


class Frontends(Protocol):
    """A mesh, as its clients see it."""

    @property
    def frontends(self) -> Mapping[str, FrontendCore]:
        """The live ones, by name."""


class Client:
    """Sends one request to a frontend, and again (as a new one) when it is refused or the frontend dies."""

    def __init__(self, mesh: Frontends, frontend: str, retry_s: float) -> None:
        self._mesh = mesh
        self._frontend = frontend
        self._retry_s = retry_s

    async def run(self, request: GenerateRequest, deadline_s: float) -> Outcome:
        """Until it has everything. Raises what the mesh says when `deadline_s` is over."""
        loop = asyncio.get_running_loop()
        outcome = Outcome(request, loop.time())
        while True:
            outcome.tries += 1
            try:
                await self._try(outcome)
                return outcome
            except (OverloadError, PeerError, FrontendDied):
                if loop.time() - outcome.arrival_s > deadline_s:
                    raise
            await asyncio.sleep(self._retry_s)

    async def _try(self, outcome: Outcome) -> None:
        frontend = self._mesh.frontends.get(self._frontend)
        if frontend is None:
            raise FrontendDied(self._frontend)
        request = outcome.request
        fresh = GenerateRequest(
            f"{request.request_id}-{outcome.tries}", request.model, request.prompt, request.sampling, request.priority
        )
        outcome.tokens = array("i")
        outcome.logprobs = None if request.sampling.logprobs is None else []
        await self._read(frontend, fresh, outcome)

    async def _read(self, frontend: FrontendCore, request: GenerateRequest, outcome: Outcome) -> None:
        loop = asyncio.get_running_loop()
        handle = await frontend.generate(request)
        async for chunk in handle:
            now_s = loop.time()
            if chunk.start != len(outcome.tokens):
                raise AssertionError(f"{request.request_id}: chunk at {chunk.start}, not {len(outcome.tokens)}")
            if outcome.last_s is not None:
                outcome.pause_s_max = max(outcome.pause_s_max, now_s - outcome.last_s)
            outcome.tokens.extend(chunk.tokens)
            if outcome.logprobs is not None:
                outcome.logprobs.extend(chunk.logprobs or ())
            outcome.first_s = now_s if outcome.first_s is None else outcome.first_s
            outcome.last_s = now_s
            outcome.finish = chunk.finish
            owner = handle.stream.owner
            if owner is not None and outcome.owners[-1:] != [owner.instance_id]:
                outcome.owners.append(owner.instance_id)
        outcome.attempts = handle.stream.attempt
        outcome.moves = handle.stream.hop
        if outcome.finish is None:
            raise FrontendDied(self._frontend)
