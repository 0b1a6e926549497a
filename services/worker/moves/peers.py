"""What a source says to destinations and frontends."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TypedDict

from meshift.backends.base import FrozenRequest
from meshift.kv_memory.layout import KvLayout
from meshift.schemas import subjects
from meshift.schemas.base import pack_tokens
from meshift.schemas.errors import MeshError, OverloadError
from meshift.schemas.identity import FrontendRef, Owner, RequestKey
from meshift.schemas.logprobs import pack_logprobs
from meshift.schemas.moves import (
    Fence,
    FenceReply,
    MoveAbort,
    MoveAnswer,
    MoveClosed,
    MoveCommit,
    MoveCommitReply,
    MoveQuestion,
    MoveReserve,
    MoveReserveReply,
)
from meshift.services.bus.base import Bus
from meshift.services.worker.moves.wire import pack_layout, shortened
from meshift.services.worker.options import WorkerOptions
from meshift.services.worker.requests import RequestRecord

logger = logging.getLogger(__name__)

ANSWER_MARGIN_S = 0.5
"""How much longer than the destination's engine the source waits for an answer."""


class _Name(TypedDict):
    request_id: str
    attempt: int
    hop: int
    source: Owner


@dataclass(frozen=True, slots=True)
class Room:
    """What a source asks a destination for."""

    tokens: Sequence[int]
    slots: int
    epoch: int | None = None
    """Of the destination's layout; None: not told yet."""
    json_schema: str | None = None
    """To be compiled there."""


class Peers:
    """Of one source. Every method but `abort` and `closed` raises what `Bus.request` raises."""

    def __init__(self, bus: Bus, owner: Owner, options: WorkerOptions) -> None:
        self._bus = bus
        self._owner = owner
        self._options = options

    async def reserve(self, key: RequestKey, destination: Owner, layout: KvLayout, room: Room) -> MoveReserveReply:
        """Room at the destination."""
        message = MoveReserve(
            **self._name(key),
            owner=destination,
            layout=pack_layout(layout),
            tokens=pack_tokens(room.tokens),
            slots=room.slots,
            epoch=room.epoch,
            json_schema=room.json_schema,
            deadline_s=self._options.reservation_s,
        )
        subject = subjects.worker_move_reserve(destination.instance_id)
        timeout_s = self._options.move_timeout_s
        return await self._bus.request(subject, message, MoveReserveReply, timeout_s=timeout_s)

    @asynccontextmanager
    async def renewing(self, key: RequestKey, destination: Owner, layout: KvLayout, room: Room) -> AsyncIterator[None]:
        """The reservation is renewed inside, however long that takes."""
        renewals = asyncio.get_running_loop().create_task(self._renew(key, destination, layout, room))
        try:
            yield
        finally:
            renewals.cancel()

    async def _renew(self, key: RequestKey, destination: Owner, layout: KvLayout, room: Room) -> None:
        while True:
            await asyncio.sleep(self._options.reservation_s / 3)
            # If it is refused or lost, the copy fails or the next one is in time.
            with suppress(MeshError):
                await self.reserve(key, destination, layout, room)

    async def commit(
        self,
        record: RequestRecord,
        key: RequestKey,
        destination: Owner,
        frozen: FrozenRequest,
        lease_s: float,
        epoch: int,
    ) -> MoveCommitReply:
        """Hand it over. `epoch`: of the destination's layout, as it was told."""
        message = MoveCommit(
            **self._name(key),
            owner=destination,
            frontend=record.frontend,
            lease_s=lease_s,
            prompt=record.prompt,
            output=pack_tokens(frozen.output),
            base=record.base,
            logprobs=None if record.logprobs is None else pack_logprobs(record.logprobs),
            sampling=record.sampling,
            priority=record.priority,
            computed=frozen.computed,
            state=frozen.state,
            kv_hashes=frozen.kv_hashes,
            epoch=epoch,
            timeout_s=self._options.move_timeout_s,
        )
        subject = subjects.worker_move_commit(destination.instance_id)
        timeout_s = self._options.move_timeout_s + ANSWER_MARGIN_S
        return await self._bus.request(subject, message, MoveCommitReply, timeout_s=timeout_s)

    async def question(self, key: RequestKey, destination: Owner) -> MoveAnswer:
        """Has it committed?"""
        message = MoveQuestion(**self._name(key), owner=destination)
        subject = subjects.worker_move_question(destination.instance_id)
        timeout_s = self._options.move_timeout_s + ANSWER_MARGIN_S
        return await self._bus.request(subject, message, MoveAnswer, timeout_s=timeout_s)

    async def fence(self, key: RequestKey, destination: Owner, frontend: FrontendRef) -> FenceReply:
        """Who owns it?"""
        message = Fence(**self._name(key), frontend=frontend, destination=destination)
        subject = subjects.frontend_fence(frontend.frontend_id)
        return await self._bus.request(subject, message, FenceReply, timeout_s=self._options.move_timeout_s)

    def abort(self, key: RequestKey, destination: Owner, reason: str) -> None:
        """At most once: the destination's deadline is there for the rest."""
        message = MoveAbort(**self._name(key), owner=destination, reason=shortened(reason))
        self._publish(subjects.worker_move_abort(destination.instance_id), message)

    def closed(self, key: RequestKey, source: Owner) -> None:
        """As a destination: that one is over."""
        message = MoveClosed(owner=source, destination=self._owner, keys=(key,))
        self._publish(subjects.worker_move_closed(source.instance_id), message)

    def _publish(self, subject: str, message: MoveAbort | MoveClosed) -> None:
        try:
            self._bus.publish(subject, message)
        except OverloadError as error:
            logger.warning("%s not told: %s", subject, error)

    def _name(self, key: RequestKey) -> _Name:
        return {"request_id": key.request_id, "attempt": key.attempt, "hop": key.hop, "source": self._owner}
