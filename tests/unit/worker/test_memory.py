"""The worker's endpoint for KV memory: what the engine says, and what it says when it can't."""

import asyncio
from typing import Any

import pytest

from meshift.backends.base import Engine, KvMemoryNow, KvResized, ResizableEngine
from meshift.backends.sim.engine import SimEngine
from meshift.schemas.errors import PeerTimeout, Unavailable, Unsupported
from meshift.schemas.identity import Owner
from meshift.schemas.memory import MemoryBody, MemoryRequest, MemoryUnits
from meshift.services.worker.memory import KvMemory
from tests.contract.engine_kit import CollectingListener

OWNER = Owner(instance_id="w", incarnation=1)
UNITS = MemoryUnits(
    layers_per_group=4, groups=8, last_group_layers=2, page_tokens=16, unit_bytes=98_304, unit_waste_bytes=0,
    last_unit_waste_bytes=49_152, units=1032, committed=520, committed_bytes=520 * 98_304, waste_bytes=65 * 49_152,
)  # fmt: skip
DONE = KvResized(64, 60, 1, 2, 3, 4, "requests hold the rest", 5, UNITS)
NOW = KvMemoryNow(61, 9, UNITS)


class Resizing(SimEngine):
    """An engine that plays a resize."""

    outcome: Any = DONE
    asked: Any = None

    asks = 0

    async def kv_memory(self) -> KvMemoryNow:
        self.asks += 1
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return NOW

    async def resize_kv(self, capacity: int, *, preempt: bool = False) -> KvResized:
        self.asked = (capacity, preempt)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        result: KvResized = self.outcome
        return result


class Failing(Resizing):
    """One that can't be asked."""

    def __init__(self, outcome: Exception) -> None:
        super().__init__()
        self.outcome = outcome


def request(capacity: int = 64, preempt: bool = False) -> MemoryRequest:
    return MemoryRequest(resize=MemoryBody(capacity=capacity, preempt=preempt))


async def memory_of(engine: Engine) -> KvMemory:
    return KvMemory(OWNER, engine, await engine.start(CollectingListener()), 15.0)


async def test_what_was_done() -> None:
    engine = Resizing()
    assert isinstance(engine, ResizableEngine)
    memory = await memory_of(engine)
    reply = await memory.answer(request(80, preempt=True))
    assert engine.asked == (80, True)
    assert (reply.owner, reply.request_tokens_max, reply.evicted) == (OWNER, 60, 1)
    assert (reply.preempted, reply.released_bytes, reply.resident_bytes) == (2, 3, 4)
    assert reply.reason == "requests hold the rest"
    assert reply.units is not None
    assert reply.units == UNITS
    assert memory.newest == reply


async def test_what_there_is() -> None:
    engine = Resizing()
    reply = await (await memory_of(engine)).answer(MemoryRequest())
    load = engine.load()
    assert engine.asked is None
    assert (reply.capacity, reply.free, reply.pages) == (load.capacity, load.free, load.capacity // reply.page_tokens)
    assert (reply.request_tokens_max, reply.resident_bytes) == (61, 9)
    assert (reply.evicted, reply.released_bytes, reply.reason) == (0, 0, "")
    assert reply.units is not None
    assert reply.units.waste_bytes == 65 * 49_152


async def test_it_is_asked_every_interval_once_at_a_time() -> None:
    engine = Resizing()
    memory = await memory_of(engine)
    memory.tick(100.0)
    memory.tick(200.0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (engine.asks, memory.newest is not None) == (1, True)
    memory.tick(114.9)
    await asyncio.sleep(0)
    assert engine.asks == 1
    engine.outcome = ConnectionError("gone")
    memory.tick(115.0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert engine.asks == 2
    memory.stop()


@pytest.mark.parametrize(
    ("outcome", "error"),
    [(TimeoutError(), PeerTimeout), (ConnectionError("gone"), Unavailable), (Unavailable("not yet"), Unavailable)],
    ids=str,
)
async def test_trouble(outcome: Exception, error: type[Exception]) -> None:
    engine = Resizing()
    engine.outcome = outcome
    with pytest.raises(error):
        await (await memory_of(engine)).answer(request())
    with pytest.raises(error):
        await (await memory_of(Failing(outcome))).answer(MemoryRequest())


class Fixed:
    """An `Engine` and nothing more."""

    def __init__(self) -> None:
        engine = SimEngine()
        self.start, self.submit, self.cancel, self.load = engine.start, engine.submit, engine.cancel, engine.load
        self.check_integrity, self.stop, self.held_tokens = engine.check_integrity, engine.stop, engine.held_tokens


async def test_an_engine_of_fixed_size() -> None:
    with pytest.raises(Unsupported, match="fixed size"):
        await (await memory_of(Fixed())).answer(request())
    told = await (await memory_of(Fixed())).answer(MemoryRequest())
    assert (told.units, told.resident_bytes) == (None, None)
    fixed = await memory_of(Fixed())
    fixed.tick(0.0)
    assert fixed._asking is None
