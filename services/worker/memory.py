"""The worker's endpoint for its engine's KV memory."""

import asyncio
import logging
from typing import Any

from meshift.backends.base import Engine, EngineInfo, KvMemoryNow, KvResized, ResizableEngine
from meshift.schemas import subjects
from meshift.schemas.errors import MeshError, PeerTimeout, Unavailable, Unsupported
from meshift.schemas.identity import Owner
from meshift.schemas.memory import MemoryBody, MemoryReply, MemoryRequest
from meshift.services.bus.base import Bus, Subscription

logger = logging.getLogger(__name__)


class KvMemory:
    """Tells, and resizes while the engine serves. Load reports tell the new capacity by themselves."""

    def __init__(self, owner: Owner, engine: Engine, info: EngineInfo, interval_s: float) -> None:
        """`interval_s`: how old `newest` may become."""
        self._owner = owner
        self._engine = engine
        self._info = info
        self._interval_s = interval_s
        # Looked at once: this check costs more than all else that a tick does.
        self._resizable = engine if isinstance(engine, ResizableEngine) else None
        self._due_s = 0.0
        self._asking: asyncio.Task[None] | None = None
        self.newest: MemoryReply | None = None
        """For metrics. None: not known yet."""

    def serve(self, bus: Bus) -> Subscription:
        """Answer from now on."""
        return bus.serve("memory", subjects.worker_memory(self._owner.instance_id), MemoryRequest, self.answer)

    async def answer(self, request: MemoryRequest) -> MemoryReply:
        """Raises Unsupported, Unavailable, PeerTimeout."""
        try:
            self.newest = await (self._told() if request.resize is None else self._resized(request.resize))
        except TimeoutError as error:
            raise PeerTimeout("the engine's ranks didn't answer in time") from error
        except ConnectionError as error:
            raise Unavailable(f"the engine is gone: {error}") from error
        return self.newest

    def tick(self, now_s: float) -> None:
        """Ask the engine again if it is time."""
        if now_s < self._due_s or self._asking is not None or self._resizable is None:
            return
        self._due_s = now_s + self._interval_s
        self._asking = asyncio.get_running_loop().create_task(self._refresh())

    def stop(self) -> None:
        """Ask no more. Idempotent."""
        if self._asking is not None:
            self._asking.cancel()

    async def _refresh(self) -> None:
        try:
            await self.answer(MemoryRequest())
        except MeshError as error:
            logger.debug("%s doesn't tell its memory: %s", self._owner, error)
        finally:
            self._asking = None

    async def _told(self) -> MemoryReply:
        engine = self._resizable
        return self._reply(None if engine is None else await engine.kv_memory())

    async def _resized(self, wanted: MemoryBody) -> MemoryReply:
        engine = self._resizable
        if engine is None:
            raise Unsupported("this engine's KV memory has a fixed size")
        done = await engine.resize_kv(wanted.capacity, preempt=wanted.preempt)
        return self._reply(
            done,
            evicted=done.evicted,
            preempted=done.preempted,
            released_bytes=done.released_bytes,
            reason=done.reason,
        )

    def _reply(self, now: KvMemoryNow | KvResized | None, **done: Any) -> MemoryReply:
        load, page_tokens = self._engine.load(), self._info.page_size
        return MemoryReply(
            owner=self._owner,
            capacity=load.capacity,
            used=load.used,
            cached=load.cached,
            free=load.free,
            reserved=load.reserved,
            pages=load.capacity // page_tokens,
            page_tokens=page_tokens,
            request_tokens_max=self._info.model.context_tokens_max if now is None else now.request_tokens_max,
            resident_bytes=None if now is None else now.resident_bytes,
            units=None if now is None else now.units,
            **done,
        )
