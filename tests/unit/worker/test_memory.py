"""The worker's endpoint for KV memory: what the engine says, and what it says when it can't."""

from typing import Any

import pytest

from meshift.backends.base import KvResized, ResizableEngine
from meshift.backends.sim.engine import SimEngine
from meshift.schemas.errors import PeerTimeout, Unavailable, Unsupported
from meshift.schemas.identity import Owner
from meshift.schemas.memory import MemoryBody, MemoryRequest
from meshift.services.worker.memory import KvMemory

OWNER = Owner(instance_id="w", incarnation=1)
DONE = KvResized(64, 60, 1, 2, 3, 4, "requests hold the rest", 5)


class Resizing(SimEngine):
    """An engine that plays a resize."""

    outcome: Any = DONE
    asked: Any = None

    async def resize_kv(self, capacity: int, *, preempt: bool = False) -> KvResized:
        self.asked = (capacity, preempt)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        result: KvResized = self.outcome
        return result


def request(capacity: int = 64, preempt: bool = False) -> MemoryRequest:
    return MemoryRequest(resize=MemoryBody(capacity=capacity, preempt=preempt))


async def test_what_was_done() -> None:
    engine = Resizing()
    assert isinstance(engine, ResizableEngine)
    reply = await KvMemory(OWNER, engine).resize(request(80, preempt=True))
    assert engine.asked == (80, True)
    assert (reply.owner, reply.capacity, reply.request_tokens_max, reply.evicted) == (OWNER, 64, 60, 1)
    assert (reply.preempted, reply.released_bytes, reply.resident_bytes) == (2, 3, 4)
    assert reply.reason == "requests hold the rest"


@pytest.mark.parametrize(
    ("outcome", "error"),
    [(TimeoutError(), PeerTimeout), (ConnectionError("gone"), Unavailable), (Unavailable("not yet"), Unavailable)],
    ids=str,
)
async def test_trouble(outcome: Exception, error: type[Exception]) -> None:
    engine = Resizing()
    engine.outcome = outcome
    with pytest.raises(error):
        await KvMemory(OWNER, engine).resize(request())


async def test_an_engine_of_fixed_size() -> None:
    with pytest.raises(Unsupported, match="fixed size"):
        await KvMemory(OWNER, SimEngine()).resize(request())
