"""The worker's endpoint for its engine's KV memory."""

from meshift.backends.base import Engine, ResizableEngine
from meshift.schemas import subjects
from meshift.schemas.errors import PeerTimeout, Unavailable, Unsupported
from meshift.schemas.identity import Owner
from meshift.schemas.memory import MemoryReply, MemoryRequest
from meshift.services.bus.base import Bus, Subscription


class KvMemory:
    """Resizes while the engine serves. Load reports tell the new capacity by themselves."""

    def __init__(self, owner: Owner, engine: Engine) -> None:
        self._owner = owner
        self._engine = engine

    def serve(self, bus: Bus) -> Subscription:
        """Answer from now on."""
        return bus.serve("memory", subjects.worker_memory(self._owner.instance_id), MemoryRequest, self.resize)

    async def resize(self, request: MemoryRequest) -> MemoryReply:
        """Raises Unsupported, Unavailable, PeerTimeout."""
        engine = self._engine
        if not isinstance(engine, ResizableEngine):
            raise Unsupported("this engine's KV memory has a fixed size")
        try:
            done = await engine.resize_kv(request.resize.capacity, preempt=request.resize.preempt)
        except TimeoutError as error:
            raise PeerTimeout("the engine's ranks didn't answer in time") from error
        except ConnectionError as error:
            raise Unavailable(f"the engine is gone: {error}") from error
        return MemoryReply(
            owner=self._owner,
            capacity=done.capacity,
            request_tokens_max=done.request_tokens_max,
            evicted=done.evicted,
            preempted=done.preempted,
            released_bytes=done.released_bytes,
            resident_bytes=done.resident_bytes,
            reason=done.reason,
        )
