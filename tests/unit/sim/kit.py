"""What the unit tests of the simulated engine share."""

import asyncio
import zlib
from collections.abc import Sequence
from itertools import count

from meshift.backends.base import EngineFailure, EngineRequest, FrozenRequest, MoveKey, Reserved, TokenEvent
from meshift.backends.sim import SimEngine, SimParameters
from meshift.backends.sim.work import Emit
from meshift.kv_memory.layout import KvLayout
from meshift.kv_memory.rectangle import Rectangle
from meshift.kv_memory.transport import Link, MemoryFabric, MemoryTransport
from meshift.kv_memory.transport.base import Address, Patch
from meshift.schemas.identity import RequestKey
from meshift.schemas.requests import Finish, Priority, Sampling

MS = 1_000_000
_numbers = count(1)

# Times that a test can add up in its head: a step of 10 ms, a prefill of 20 ms plus 1 ms a token, KV at 1 ms a token.
PLAIN = SimParameters(
    capacity=160,
    page_size=16,
    decode_step_ns=10 * MS,
    decode_request_ns=0,
    decode_token_ns=0,
    prefill_batch_ns=20 * MS,
    prefill_token_ns=MS,
    prefill_token_squared_ns=0,
    copy_token_ns=MS,
    copy_round_ns=5 * MS,
    cutover_ns=25 * MS,
)

WIDE = PLAIN.model_copy(update={"capacity": 480})


def now_ns() -> int:
    """Virtual time."""
    return round(asyncio.get_running_loop().time() * 1_000_000_000)


class Recorder:
    """A listener that notes when what came."""

    def __init__(self) -> None:
        self.times: dict[RequestKey, list[int]] = {}
        """When each token came, ns."""
        self.tokens: dict[RequestKey, list[int]] = {}
        self.ends: dict[RequestKey, Finish] = {}
        self.failures: list[EngineFailure] = []

    def on_step(self, events: Sequence[TokenEvent]) -> None:
        for event in events:
            self.times.setdefault(event.key, []).extend([now_ns()] * len(event.tokens))
            self.tokens.setdefault(event.key, []).extend(event.tokens)
            if event.finish is not None:
                self.ends[event.key] = event.finish

    def on_failure(self, failure: EngineFailure) -> None:
        self.failures.append(failure)


def make_request(prompt: int | Sequence[int], new: int, *, priority: int = 0, **sampling: object) -> EngineRequest:
    """A request of a prompt's length (or the prompt) and the number of new tokens."""
    tokens = [(7 * index) % 1_000 for index in range(prompt)] if isinstance(prompt, int) else prompt
    chosen = Sampling.model_validate({"max_new_tokens": new, "temperature": 0.0, "ignore_eos": True, **sampling})
    return EngineRequest(RequestKey(f"u{next(_numbers)}", 1, 0), tokens, (), chosen, Priority(scheduling=priority))


async def started(
    parameters: SimParameters = PLAIN, *, skip_steps: bool = False, emit: Emit = "step"
) -> tuple[SimEngine, Recorder]:
    """A running engine without a data plane."""
    engine, recorder = SimEngine(parameters, skip_steps=skip_steps, emit=emit), Recorder()
    await engine.start(recorder)
    return engine, recorder


async def until_idle(engine: SimEngine, limit_s: float = 600.0) -> None:
    """Until nothing runs or waits; then memory must be whole."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit_s
    while engine.load().running or engine.load().waiting:
        assert loop.time() < deadline, engine.load()
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.001)
    await engine.check_integrity()


async def undisturbed(request: EngineRequest) -> list[int]:
    """The request's tokens if it is left alone."""
    engine, seen = await started(WIDE)
    engine.submit(request)
    await until_idle(engine)
    await engine.stop(1.0)
    return seen.tokens[request.key]


class Duo:
    """Two running engines on one fabric, and the moves between them."""

    def __init__(self, parameters: SimParameters = PLAIN, other: SimParameters | None = None) -> None:
        self.fabric = MemoryFabric(link=Link())
        self.source = SimEngine(parameters, transport=MemoryTransport(self.fabric, "source"))
        self.destination = SimEngine(other or parameters, transport=MemoryTransport(self.fabric, "destination"))
        self.layouts: list[KvLayout] = []
        self.before = Recorder()
        self.after = Recorder()

    async def start(self) -> "Duo":
        infos = [await self.source.start(self.before), await self.destination.start(self.after)]
        self.layouts = [info.layout for info in infos if info.layout is not None]
        return self

    async def running(self, request: EngineRequest) -> MoveKey:
        """Submit it, wait for its first token; the key of its move."""
        self.source.submit(request)
        for _ in range(100_000):
            if self.before.tokens.get(request.key):
                break
            await asyncio.sleep(0.001)
        return MoveKey(request.key.request_id, request.key.attempt, request.key.hop + 1)

    @property
    def layout(self) -> KvLayout:
        """Both engines'."""
        assert self.layouts[0] == self.layouts[1]
        return self.layouts[0]

    async def reserve(self, key: MoveKey, tokens: Sequence[int], slots: int, deadline_s: float = 10.0) -> Reserved:
        """Room at the destination."""
        return await self.destination.reserve(key, self.layout, tokens, slots, deadline_s)

    async def up_to_commit(self, key: MoveKey, slots: int = 96) -> FrozenRequest:
        """All of a move but its commit."""
        begun = await self.source.begin_move(key)
        reserved = await self.reserve(key, begun.tokens, slots)
        sent = await self.source.send_delta(key, 0, reserved)
        return await self.source.freeze(key, sent.end, reserved)

    async def commit(self, key: MoveKey, frozen: FrozenRequest, request: EngineRequest) -> None:
        """At the destination."""
        await self.destination.commit(key, frozen, request, 1.0)

    async def whole(self) -> None:
        """Both are idle and have all their memory."""
        for engine in (self.source, self.destination):
            await until_idle(engine)
            load = engine.load()
            assert load.free == load.capacity, load


class Wire:
    """A sender of patches that a test makes up."""

    def __init__(self, duo: Duo, key: MoveKey, target: Address) -> None:
        self._name = f"{key.request_id}/{key.attempt}.{key.hop}"
        self._target = target
        self._end = MemoryTransport(duo.fabric, "elsewhere")

    async def send(self, area: tuple[int, int], payload: bytes, watermark: int = 1, generation: int = 0) -> None:
        await self._end.start()
        rectangle = Rectangle(0, 1, *area, 0, 1)
        patch = Patch(self._name, watermark, generation, rectangle, payload, zlib.crc32(payload))
        await self._end.send(self._target, patch, timeout_s=1.0)


def arrival(request: EngineRequest, key: MoveKey, frozen: FrozenRequest) -> EngineRequest:
    """The request as the mesh gives it to the destination."""
    return EngineRequest(key.destination, request.prompt, frozen.output, request.sampling, request.priority)
