"""A random course of events for two simulated engines, and everything that can be seen of it."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from meshift.backends.base import EngineFailure, EngineRequest, MoveKey, MoveRefused, TokenEvent
from meshift.backends.sim import SimEngine, SimParameters
from meshift.backends.sim.work import Emit
from meshift.kv_memory.transport import Link, MemoryFabric, MemoryTransport
from meshift.schemas.identity import RequestKey
from meshift.schemas.requests import Priority, Sampling
from meshift.services.simulation import virtual_time

# Round times make boundaries, arrivals and arrivals of patches fall together often.
ROUND = SimParameters(
    capacity=512,
    decode_step_ns=10_000_000,
    decode_request_ns=1_000_000,
    decode_token_ns=0,
    prefill_batch_ns=10_000_000,
    prefill_token_ns=1_000_000,
    prefill_token_squared_ns=0,
    copy_token_ns=1_000_000,
    cutover_ns=20_000_000,
    eos_per_million=5_000,
)
SMALL = SimParameters(capacity=700, page_size=16, prefill_tokens_max=200, eos_per_million=2_000)
ODD = SimParameters(capacity=301, page_size=7, copying_slowdown_percent=3, decode_token_ns=33_333)
PARAMETERS = {"round": ROUND, "small": SMALL, "odd": ODD}

GRID_S = 0.005


@dataclass
class Log:
    """What an observer of the two engines sees; `events` by engine."""

    events: list[list[tuple[float, TokenEvent]]] = field(default_factory=lambda: [[], []])
    loads: list[object] = field(default_factory=list)
    moves: list[object] = field(default_factory=list)

    def streams(self) -> dict[tuple[int, RequestKey], list[int]]:
        """All tokens by engine and key."""
        found: dict[tuple[int, RequestKey], list[int]] = {}
        for index, events in enumerate(self.events):
            for _, event in events:
                found.setdefault((index, event.key), []).extend(event.tokens)
        return found

    def ends(self) -> list[list[tuple[float, RequestKey, object]]]:
        """When and how each request ended, by engine."""
        return [[(at, event.key, event.finish) for at, event in events if event.finish] for events in self.events]

    def firsts(self) -> dict[tuple[int, RequestKey], float]:
        """When the first token of each submission came (those that a move or a resume brought excepted)."""
        found: dict[tuple[int, RequestKey], float] = {}
        for index, events in enumerate(self.events):
            for at, event in events:
                if event.tokens and (event.key.attempt, event.key.hop) == (1, 0):
                    found.setdefault((index, event.key), at)
        return found


class Observer:
    """The listener of one engine; some finishes make it submit another request at once."""

    def __init__(self, world: "World", index: int) -> None:
        self._world = world
        self._index = index

    def on_step(self, events: Sequence[TokenEvent]) -> None:
        now_s = asyncio.get_running_loop().time()
        for event in events:
            self._world.log.events[self._index].append((now_s, event))
            if event.finish is not None and event.key in self._world.follow_ups:
                self._world.engines[self._index].submit(self._world.follow_ups.pop(event.key))

    def on_failure(self, failure: EngineFailure) -> None:
        raise AssertionError(failure)


class World:
    """Two engines, and a script that is the same for every way to run them."""

    def __init__(self, seed: int, parameters: SimParameters, *, skip_steps: bool, emit: Emit) -> None:
        self.random = random.Random(seed)
        self.log = Log()
        self.follow_ups: dict[RequestKey, EngineRequest] = {}
        self.submitted: dict[RequestKey, tuple[int, EngineRequest]] = {}
        latency_s = self.random.choice((0.0, 0.005))
        fabric = MemoryFabric(link=Link(latency_s=latency_s))
        self.engines = [
            SimEngine(parameters, transport=MemoryTransport(fabric, name), skip_steps=skip_steps, emit=emit)
            for name in ("left", "right")
        ]
        self._capacity = parameters.pages * parameters.page_size
        self._numbers = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> Log:
        """The whole course, until nothing is left."""
        for index, engine in enumerate(self.engines):
            info = await engine.start(Observer(self, index))
            assert info.layout is not None
            self.layout = info.layout
        for _ in range(self.random.randrange(20, 80)):
            if self.random.random() < 0.6:
                await asyncio.sleep(self.random.choice((1, 1, 2, 5, 20, 60)) * GRID_S)
            await self._act()
        for task in self._tasks:
            await task
        while any(engine.load().running + engine.load().waiting for engine in self.engines):
            await asyncio.sleep(20 * GRID_S)
            self._look()
        for engine in self.engines:
            await engine.check_integrity()
            assert engine.load().free == self._capacity, engine.load()
            await engine.stop(1.0)
        return self.log

    async def _act(self) -> None:
        kind = self.random.random()
        if kind < 0.5:
            self._submit(self.random.randrange(2))
        elif kind < 0.65:
            self._cancel()
        elif kind < 0.85:
            self._move()
        else:
            self._look()
            for engine in self.engines:
                await engine.check_integrity()

    def _look(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for engine in self.engines:
            load = engine.load()
            assert load.used + load.cached + load.free + load.reserved == load.capacity
            self.log.loads.append((now_s, load))

    def _request(self) -> EngineRequest:
        rng = self.random
        self._numbers += 1
        prompt = [rng.randrange(32_000) for _ in range(rng.randrange(1, 120))]
        most = rng.choice((1, 5, 40, 150))
        output = [rng.randrange(32_000) for _ in range(rng.randrange(most))] if rng.random() < 0.2 else []
        sampling = Sampling(
            max_new_tokens=most,
            min_new_tokens=rng.choice((0, 3)),
            temperature=rng.choice((0.0, 1.0)),
            seed=rng.choice((None, 1)),
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=tuple(rng.randrange(32_000) for _ in range(300)) if rng.random() < 0.3 else (),
        )
        priority = Priority(scheduling=rng.choice((0, 0, 0, 1, -1)))
        return EngineRequest(RequestKey(f"r{self._numbers}", 1, 0), prompt, output, sampling, priority)

    def _submit(self, index: int) -> None:
        request = self._request()
        self.submitted[request.key] = (index, request)
        self.engines[index].submit(request)
        if self.random.random() < 0.2:
            self.follow_ups[request.key] = self._request()

    def _cancel(self) -> None:
        if self.submitted:
            key = self.random.choice(list(self.submitted))
            # Wherever it is by now, under whichever hop.
            for hop in range(3):
                for engine in self.engines:
                    engine.cancel(key._replace(hop=hop))

    def _move(self) -> None:
        if self.submitted:
            key = self.random.choice(list(self.submitted)[-8:])
            index, request = self.submitted.pop(key)
            give_up = self.random.choice((None, None, None, "begin", "reserve", "copy", "freeze"))
            self._tasks.append(asyncio.create_task(self._try_move(index, request, give_up)))

    async def _try_move(self, index: int, request: EngineRequest, give_up: str | None) -> None:
        key = MoveKey(request.key.request_id, request.key.attempt, request.key.hop + 1)
        source, destination = self.engines[index], self.engines[1 - index]
        loop = asyncio.get_running_loop()
        try:
            await self._copy_over(key, source, destination, request, give_up)
        except MoveRefused as refusal:
            self.log.moves.append((loop.time(), key, str(refusal)))
            await destination.abort(key)
            await source.resume(key, 2)
            return
        self.log.moves.append((loop.time(), key, "moved"))
        self.submitted[key.destination] = (
            1 - index,
            EngineRequest(key.destination, request.prompt, (), request.sampling, request.priority),
        )

    async def _copy_over(
        self, key: MoveKey, source: SimEngine, destination: SimEngine, request: EngineRequest, give_up: str | None
    ) -> None:
        def step(name: str) -> None:
            if give_up == name:
                raise MoveRefused(f"given up after {name}")

        begun = await source.begin_move(key)
        step("begin")
        state_only = not begun.tokens or self.random.random() < 0.2
        tokens, slots = ((), 0) if state_only else (begun.tokens, len(begun.tokens) + 40)
        reserved = await destination.reserve(key, self.layout, tokens, slots, 10.0)
        step("reserve")
        start = reserved.cached
        for _ in range(0 if state_only else 2):
            sent = await source.send_delta(key, start, reserved)
            start = sent.end
            step("copy")
        if not state_only:
            reserved = await destination.reserve(key, self.layout, begun.tokens, start + 16, 10.0)
        frozen = await source.freeze(key, start, None if state_only else reserved)
        step("freeze")
        arrival = EngineRequest(key.destination, request.prompt, frozen.output, request.sampling, request.priority)
        await destination.commit(key, frozen, arrival, 1.0)
        await source.release(key)


def observe(seed: int, parameters: SimParameters, *, skip_steps: bool, emit: Emit) -> Log:
    """Run the course of `seed` in virtual time."""
    return virtual_time.run(World(seed, parameters, skip_steps=skip_steps, emit=emit).run())
