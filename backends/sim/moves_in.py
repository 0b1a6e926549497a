"""The destination's end of request moves: reservations with deadlines, and what arrives for them."""

import asyncio
from array import array
from collections.abc import Callable, Sequence
from zlib import crc32

from meshift.backends.base import EngineRequest, FrozenRequest, MoveKey, MoveRefused, Refusal, Reserved
from meshift.backends.bounded import BoundedSet
from meshift.backends.sim.clock import NANOSECONDS, Clock
from meshift.backends.sim.core import EngineCore
from meshift.backends.sim.moves_out import transfer_id, unpack_state
from meshift.backends.sim.request import SimRequest
from meshift.backends.sim.tokens import SLOT_BYTES
from meshift.kv_memory.layout import KvLayout
from meshift.kv_memory.transport.base import Address, Patch, Transport

TOMBSTONES_MAX = 65_536
"""Ended moves that are remembered, to refuse a late commit; the oldest go first."""


class Incoming:
    """One reservation, and the KV that was applied to it."""

    def __init__(self, key: MoveKey) -> None:
        self.key = key
        self.targets: tuple[Address, ...] = ()
        self.pages = 0
        self.copies = False
        """Whether the engine counts it among those that slow its steps down."""
        self.slots = array("I")
        """Zero where nothing was applied."""
        self.applied = 0
        """Tokens [0, applied) have been applied, of one generation."""
        self.watermark = -1
        self.generation = 0
        self.timer: asyncio.TimerHandle | None = None

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
        newer = patch.generation > self.generation
        if patch.generation < self.generation or (patch.watermark < self.watermark and not newer):
            raise ValueError(f"generation {patch.generation} or watermark {patch.watermark} is older than seen")
        values = array("I")
        values.frombytes(payload)
        self.slots[area.token_start : area.token_end] = values
        self.generation, self.watermark = patch.generation, patch.watermark
        applied = 0 if newer else self.applied
        self.applied = max(applied, area.token_end) if area.token_start <= applied else applied


class MovesIn:
    """Every reservation ends by commit, abort, its deadline, or the engine's end; a tombstone refuses what comes
    after the latter three."""

    def __init__(self, core: EngineCore, clock: Clock, transport: Transport, layout: KvLayout) -> None:
        self._core = core
        self._clock = clock
        self._transport = transport
        self._layout = layout
        self._incoming: dict[MoveKey, Incoming] = {}
        self._tombstones: BoundedSet[MoveKey] = BoundedSet(TOMBSTONES_MAX)

    @property
    def pages(self) -> int:
        """Pages promised."""
        return sum(incoming.pages for incoming in self._incoming.values())

    def reserve(self, key: MoveKey, layout: KvLayout, tokens: Sequence[int], slots: int, deadline_s: float) -> Reserved:
        """Raises MoveRefused if there is no room, or the move has ended here."""
        core, page_size = self._core, self._core.parameters.page_size
        core.catch_up()
        if key in self._tombstones or core.requests.has_seen(key.destination):
            raise MoveRefused(f"{key} has ended here", Refusal.UNKNOWN)
        mismatch = layout.mismatch(self._layout)
        if mismatch or slots < len(tokens):
            reason = mismatch or f"{slots} slots for {len(tokens)} tokens"
            raise MoveRefused(f"{key}: {reason}", Refusal.INCOMPATIBLE)
        incoming = self._incoming.get(key)
        more = core.parameters.pages_of(slots) - (incoming.pages if incoming else 0)
        if more > 0 and not core.reserve(more):
            raise MoveRefused(f"{key}: {more} pages wanted, {core.pool.free - core.taken()} free", Refusal.NO_ROOM)
        incoming = incoming or self._open(key)
        incoming.grow(max(0, more), page_size)
        if incoming.pages and not incoming.copies:
            incoming.copies = True
            core.add_copying(1)
        self._renew(incoming, deadline_s)
        return Reserved(len(incoming.slots), 0, self._layout, incoming.targets)

    def commit(
        self, key: MoveKey, frozen: FrozenRequest, request: EngineRequest, build: Callable[[EngineRequest], SimRequest]
    ) -> None:
        """The request joins. Nothing has changed if it raises MoveRefused. `build` checks the request and makes it."""
        incoming = self._require(key)
        _check_request(key, frozen, request)
        if frozen.computed > incoming.applied:
            raise MoveRefused(f"{key}: {incoming.applied} of {frozen.computed} tokens applied", Refusal.BROKEN)
        if frozen.kv_hashes and frozen.kv_hashes != (crc32(incoming.slots[: frozen.computed].tobytes()),):
            raise MoveRefused(f"{key}: what arrived is not what was sent", Refusal.BROKEN)
        arrived = build(EngineRequest(request.key, request.prompt, frozen.output, request.sampling, request.priority))
        unpack_state(arrived, frozen.state)
        arrived.computed = frozen.computed
        if frozen.computed:
            arrived.generation.arrive(incoming.slots[: frozen.computed])
        self._close(incoming)
        self._core.insert(arrived, incoming.pages)

    def abort(self, key: MoveKey) -> None:
        """Idempotent; leaves a committed request alone."""
        self._core.catch_up()
        self._tombstones.add(key)
        incoming = self._incoming.get(key)
        if incoming is not None:
            self._close(incoming)
            self._core.unreserve(incoming.pages)

    def end(self) -> None:
        """Abort all."""
        for key in list(self._incoming):
            self.abort(key)

    def _require(self, key: MoveKey) -> Incoming:
        self._core.catch_up()
        incoming = self._incoming.get(key)
        if incoming is None:
            raise MoveRefused(f"{key} has no reservation here", Refusal.UNKNOWN)
        return incoming

    def _open(self, key: MoveKey) -> Incoming:
        incoming = self._incoming[key] = Incoming(key)
        incoming.targets = (self._transport.open_transfer(transfer_id(key), incoming.apply),)
        return incoming

    def _renew(self, incoming: Incoming, deadline_s: float) -> None:
        if incoming.timer is not None:
            incoming.timer.cancel()
        when_ns = self._clock.now_ns() + round(deadline_s * NANOSECONDS)
        incoming.timer = self._clock.call_at_ns(when_ns, self.abort, incoming.key)

    def _close(self, incoming: Incoming) -> None:
        """Writers go quiet first; the caller then disposes of the pages."""
        self._transport.close_transfer(transfer_id(incoming.key))
        if incoming.timer is not None:
            incoming.timer.cancel()
        del self._incoming[incoming.key]
        self._core.add_copying(-incoming.copies)


def _check_request(key: MoveKey, frozen: FrozenRequest, request: EngineRequest) -> None:
    """Raises MoveRefused unless the frozen state and the request belong together."""
    known = len(request.prompt) + len(frozen.output)
    whole = frozen.computed == 0 or (frozen.computed == known - 1 and frozen.output)
    if request.key != key.destination or not whole:
        reason = f"{request.key} with {frozen.computed} of {known} tokens computed"
        raise MoveRefused(f"{key}: {reason}", Refusal.INCOMPATIBLE)
    if tuple(request.output) != frozen.output[: len(request.output)]:
        raise MoveRefused(f"{key}: the request's output is not the frozen one's", Refusal.INCOMPATIBLE)
