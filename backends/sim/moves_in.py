"""The destination's end of request moves: reservations with deadlines, and what arrives for them."""

import asyncio
from array import array
from collections.abc import Callable, Sequence
from zlib import crc32

from meshift.backends.base import EngineRequest, FrozenRequest, MoveKey, MoveRefused, Reserved
from meshift.backends.sim.bounded import BoundedSet
from meshift.backends.sim.clock import NANOSECONDS, Clock
from meshift.backends.sim.core import EngineCore
from meshift.backends.sim.moves_out import transfer_id, unpack_state
from meshift.backends.sim.request import SimRequest
from meshift.backends.sim.tokens import SLOT_BYTES
from meshift.kv_memory.transport.base import Address, Patch, Transport

TOMBSTONES_MAX = 65_536
"""Ended moves that are remembered, to refuse a late commit; the oldest go first."""


class Incoming:
    """One reservation, and the KV that was applied to it."""

    def __init__(self, key: MoveKey) -> None:
        self.key = key
        self.pages = 0
        self.slots = array("I")
        """Zero where nothing was applied."""
        self.watermark = -1
        self.generation = 0
        self.checksum = 0
        self.timer: asyncio.TimerHandle | None = None
        self.address: Address | None = None
        self.waiters: list[tuple[int, asyncio.Future[int]]] = []

    def grow(self, pages: int, page_size: int) -> None:
        """Room for that many pages more."""
        self.pages += pages
        self.slots.extend([0] * (pages * page_size))

    def apply(self, patch: Patch) -> None:
        """A `PatchHandler`. Raises ValueError for what can't be applied."""
        area = patch.rectangle
        payload = bytes(patch.payload)
        if area.token_end > len(self.slots) or len(payload) != area.tokens * SLOT_BYTES:
            raise ValueError(f"{len(payload)} bytes for {area} in {len(self.slots)} slots")
        if patch.generation < self.generation or patch.watermark < self.watermark:
            raise ValueError(f"generation {patch.generation} or watermark {patch.watermark} is older than seen")
        values = array("I")
        values.frombytes(payload)
        self.slots[area.token_start : area.token_end] = values
        self.generation, self.watermark, self.checksum = patch.generation, patch.watermark, crc32(payload)
        for watermark, waiter in self.waiters:
            if watermark <= self.watermark and not waiter.done():
                waiter.set_result(self.checksum)

    def close(self, reason: str) -> None:
        """Nobody waits for it any more."""
        if self.timer is not None:
            self.timer.cancel()
        for _, waiter in self.waiters:
            if not waiter.done():
                waiter.set_exception(MoveRefused(reason))


class MovesIn:
    """Every reservation ends by commit, abort, its deadline, or the engine's end; a tombstone refuses what comes
    after the latter three."""

    def __init__(self, core: EngineCore, clock: Clock, transport: Transport) -> None:
        self._core = core
        self._clock = clock
        self._transport = transport
        self._incoming: dict[MoveKey, Incoming] = {}
        self._tombstones: BoundedSet[MoveKey] = BoundedSet(TOMBSTONES_MAX)

    @property
    def pages(self) -> int:
        """Pages promised."""
        return sum(incoming.pages for incoming in self._incoming.values())

    def reserve(self, key: MoveKey, tokens: Sequence[int], slots: int, deadline_s: float) -> Reserved:
        """Raises MoveRefused if there is no room, or the move has ended here."""
        core, page_size = self._core, self._core.parameters.page_size
        core.catch_up()
        if key in self._tombstones or core.requests.has_seen(key.destination):
            raise MoveRefused(f"{key} has ended here")
        if slots < len(tokens):
            raise MoveRefused(f"{key}: {slots} slots for {len(tokens)} tokens")
        incoming = self._incoming.get(key)
        more = core.parameters.pages_of(slots) - (incoming.pages if incoming else 0)
        if more > 0 and not core.reserve(more):
            raise MoveRefused(f"{key}: {more} pages wanted, {core.pool.free - core.taken()} free")
        if incoming is None:
            incoming = self._open(key)
        incoming.grow(max(0, more), page_size)
        self._renew(incoming, deadline_s)
        assert incoming.address is not None
        return Reserved(len(incoming.slots), 0, (incoming.address,))

    async def applied(self, key: MoveKey, watermark: int, timeout_s: float) -> int:
        """Raises MoveRefused at the timeout, or when the reservation ends."""
        incoming = self._require(key)
        if incoming.watermark >= watermark:
            return incoming.checksum
        waiter: asyncio.Future[int] = self._clock.future()
        incoming.waiters.append((watermark, waiter))
        try:
            until_ns = self._clock.now_ns() + round(timeout_s * NANOSECONDS)
            checksum: int = await self._clock.wait(waiter, until_ns)
        except TimeoutError:
            raise MoveRefused(f"{key}: watermark {watermark} not applied within {timeout_s} s") from None
        finally:
            incoming.waiters.remove((watermark, waiter))
        return checksum

    def commit(
        self, key: MoveKey, frozen: FrozenRequest, request: EngineRequest, build: Callable[[EngineRequest], SimRequest]
    ) -> None:
        """The request joins. Nothing has changed if it raises MoveRefused. `build` checks the request and makes it."""
        incoming = self._require(key)
        known = len(request.prompt) + len(frozen.output)
        if request.key != key.destination or frozen.computed != known - 1 or not frozen.output:
            raise MoveRefused(f"{key}: {request.key} with {frozen.computed} of {known} tokens computed")
        if tuple(request.output) != frozen.output[: len(request.output)]:
            raise MoveRefused(f"{key}: the request's output is not the frozen one's")
        if frozen.computed > len(incoming.slots):
            raise MoveRefused(f"{key}: {frozen.computed} tokens in {len(incoming.slots)} slots")
        arrived = build(EngineRequest(request.key, request.prompt, frozen.output, request.sampling, request.priority))
        unpack_state(arrived, frozen.state)
        arrived.computed = frozen.computed
        arrived.generation.arrive(incoming.slots[: frozen.computed])
        self._close(incoming, "committed")
        self._core.insert(arrived, incoming.pages)

    def abort(self, key: MoveKey, reason: str = "aborted") -> None:
        """Idempotent; leaves a committed request alone."""
        self._core.catch_up()
        self._tombstones.add(key)
        incoming = self._incoming.get(key)
        if incoming is not None:
            self._close(incoming, reason)
            self._core.unreserve(incoming.pages)

    def end(self, reason: str) -> None:
        """Abort all."""
        for key in list(self._incoming):
            self.abort(key, reason)

    def _require(self, key: MoveKey) -> Incoming:
        self._core.catch_up()
        incoming = self._incoming.get(key)
        if incoming is None:
            raise MoveRefused(f"{key} has no reservation here")
        return incoming

    def _open(self, key: MoveKey) -> Incoming:
        incoming = Incoming(key)
        incoming.address = self._transport.open_transfer(transfer_id(key), incoming.apply)
        self._incoming[key] = incoming
        self._core.add_copying(1)
        return incoming

    def _renew(self, incoming: Incoming, deadline_s: float) -> None:
        if incoming.timer is not None:
            incoming.timer.cancel()
        when_ns = self._clock.now_ns() + round(deadline_s * NANOSECONDS)
        incoming.timer = self._clock.call_at_ns(when_ns, self.abort, incoming.key, "expired")

    def _close(self, incoming: Incoming, reason: str) -> None:
        """Writers go quiet first; the caller then disposes of the pages."""
        self._transport.close_transfer(transfer_id(incoming.key))
        incoming.close(f"{incoming.key}: {reason}")
        del self._incoming[incoming.key]
        self._core.add_copying(-1)
