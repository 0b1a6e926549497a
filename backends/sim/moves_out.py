"""The source's end of request moves."""

import asyncio
import json
from zlib import crc32

from meshift.backends.base import DeltaSent, FrozenRequest, MoveBegun, MoveKey, MoveRefused, Refusal, Reserved
from meshift.backends.sim.clock import NANOSECONDS, Clock
from meshift.backends.sim.core import EngineCore
from meshift.backends.sim.lifecycle import RequestState
from meshift.backends.sim.outbox import Outbox
from meshift.backends.sim.request import SimRequest
from meshift.kv_memory.layout import KvLayout
from meshift.kv_memory.rectangle import Rectangle
from meshift.kv_memory.transport.base import Patch, Transport, TransportError

STATE_NAMES = ("admitted_ns", "arrived_ns", "preemptions", "loss_ns", "preempted_ns")


def transfer_id(key: MoveKey) -> str:
    """The name of the move's transfer, the same at both ends."""
    return f"{key.request_id}/{key.attempt}.{key.hop}"


class MovesOut:
    """A request's move is an attribute of the request: when it ends or is preempted, so does the move."""

    def __init__(
        self, core: EngineCore, clock: Clock, outbox: Outbox, transport: Transport, layout: KvLayout, verify: bool
    ) -> None:
        self._core = core
        self._clock = clock
        self._outbox = outbox
        self._transport = transport
        self._layout = layout
        self._verify = verify
        self._gather_free_ns = 0
        """When the rounds that are being gathered are done: they take turns."""

    def begin(self, key: MoveKey) -> MoveBegun:
        """Raises MoveRefused unless the request decodes or waits here and isn't moving."""
        core = self._core
        core.catch_up()
        request = core.requests.get(key.source)
        if request is None or request.cancelled:
            raise MoveRefused(f"{key.source} is {'not here' if request is None else 'cancelled'}", Refusal.UNKNOWN)
        if request.move is not None:
            raise MoveRefused(f"{key.source} moves already, as hop {request.move.hop}", Refusal.BUSY)
        if request.state not in (RequestState.RUNNING, RequestState.WAITING):
            raise MoveRefused(f"{key.source} is in {request.state.name.lower()}", Refusal.BUSY)
        core.start_move(request, key)
        computed, generated = core.counts(request)
        tokens = request.generation.first(computed) if request.copies else ()
        return MoveBegun(tokens, request.generation.sampling.max_new_tokens - generated)

    async def send(self, key: MoveKey, start: int, reserved: Reserved) -> DeltaSent:
        """One round. Raises MoveRefused when the transfer breaks, too."""
        request = self._moving(key)
        if request.state is not RequestState.RUNNING:
            raise MoveRefused(f"{key}: no KV to copy while {request.state.name.lower()}", Refusal.BUSY)
        end = min(self._core.counts(request)[0], reserved.slots)
        return await self._send(key, request, (start, end), reserved)

    async def freeze(self, key: MoveKey, start: int, reserved: Reserved | None) -> FrozenRequest:
        """Raises MoveRefused if it ends or is preempted before, or the rest can't be sent; it goes on then."""
        request = self._moving(key)
        if request.freeze_waiter is not None or request.state not in (RequestState.RUNNING, RequestState.WAITING):
            raise MoveRefused(f"{key}: no freeze while {request.state.name.lower()}", Refusal.BUSY)
        if reserved is not None:
            self._check_room(key, request, reserved)
        try:
            return await self._freeze(key, request, start, reserved)
        except BaseException:
            self._thaw(key)
            raise

    def release(self, key: MoveKey) -> None:
        """Frees it. Idempotent; raises AssertionError if it isn't frozen."""
        self._core.catch_up()
        request = self._core.requests.get(key.source)
        if request is not None and request.move == key:
            assert request.state is RequestState.FROZEN, f"{key}: release while {request.state.name}"
            self._core.discard(request)

    async def resume(self, key: MoveKey, attempt: int) -> None:
        """Lets it go on, under the new attempt. Idempotent."""
        request = self._core.requests.get(key.source)
        if request is not None:
            # What was generated under the old key reaches the listener under the old key, before the caller goes on.
            await self._delivered(request)
        request = self._core.requests.get(key.source)
        if request is None or request.move not in (key, None):
            return
        self._core.end_move(request)
        if attempt != request.key.attempt:
            self._core.requests.rekey(request, request.key._replace(attempt=attempt))
        if request.state is RequestState.FROZEN:
            self._core.thaw(request)

    # ---- inside

    async def _freeze(self, key: MoveKey, request: SimRequest, start: int, reserved: Reserved | None) -> FrozenRequest:
        frozen = await self._clock.wait(self._core.freeze(request))
        self._moving(key)
        if not frozen:
            raise MoveRefused(f"{key}: ended or preempted before it froze", Refusal.UNKNOWN)
        frozen_ns = self._clock.unix_ns()
        await self._delivered(request)
        self._moving(key)
        output, state = request.generation.output(0, request.generated), pack_state(request)
        if reserved is None or not request.pages:
            return FrozenRequest(0, output, state, None, (), frozen_ns)
        self._check_room(key, request, reserved)
        delta = await self._send(key, request, (start, request.computed), reserved)
        hashes = (crc32(request.generation.slots(0, request.computed)),) if self._verify else ()
        return FrozenRequest(request.computed, output, state, delta, hashes, frozen_ns)

    def _thaw(self, key: MoveKey) -> None:
        request = self._core.requests.get(key.source)
        if request is not None and request.move == key and request.state is RequestState.FROZEN:
            self._core.thaw(request)

    async def _send(self, key: MoveKey, request: SimRequest, span: tuple[int, int], reserved: Reserved) -> DeltaSent:
        start, end = span
        self._check_target(key, span, reserved)
        parameters, page_generation = self._core.parameters, request.page_generation
        frozen = request.state is RequestState.FROZEN
        cost_ns = max(parameters.copy_ns(end - start), parameters.cutover_ns if frozen else 0)
        self._gather_free_ns = max(self._gather_free_ns, self._clock.now_ns()) + cost_ns
        await self._clock.sleep_until(self._gather_free_ns)
        self._check_unchanged(key, request, page_generation)
        gathered_ns = self._clock.now_ns()
        payload = request.generation.slots(start, end)
        patch = Patch(
            transfer_id(key), end, page_generation, Rectangle(0, 1, start, end, 0, 1), payload, crc32(payload)
        )
        try:
            await self._transport.send(reserved.targets[0], patch, timeout_s=parameters.send_timeout_ns / NANOSECONDS)
        except TransportError as error:
            raise MoveRefused(f"{key}: {error}", Refusal.BROKEN) from error
        self._check_unchanged(key, request, page_generation)
        byte_count = (end - start) * parameters.kv_token_bytes
        return DeltaSent(start, end, byte_count, cost_ns, self._clock.now_ns() - gathered_ns)

    async def _delivered(self, request: SimRequest) -> None:
        """What was generated of it has reached the listener."""
        self._core.flush([request])
        while self._outbox.pending:
            await asyncio.sleep(0)
            self._core.catch_up()

    def _moving(self, key: MoveKey) -> SimRequest:
        self._core.catch_up()
        request = self._core.requests.get(key.source)
        if request is not None and request.move is None and request.lost_move == key:
            raise MoveRefused(f"{key}: it was preempted", Refusal.PREEMPTED)
        if request is None or request.move != key:
            raise MoveRefused(f"{key} is no move of a request here: it ended or never began", Refusal.UNKNOWN)
        return request

    def _check_room(self, key: MoveKey, request: SimRequest, reserved: Reserved) -> None:
        computed = self._core.counts(request)[0]
        if request.pages and computed > reserved.slots:
            raise MoveRefused(f"{key}: {computed} tokens for {reserved.slots} slots", Refusal.NO_ROOM)

    def _check_target(self, key: MoveKey, span: tuple[int, int], reserved: Reserved) -> None:
        mismatch = self._layout.mismatch(reserved.layout)
        if mismatch:
            raise MoveRefused(f"{key}: {mismatch}", Refusal.INCOMPATIBLE)
        if not 0 <= span[0] <= span[1] or len(reserved.targets) != 1:
            raise MoveRefused(f"{key}: tokens {span} to {len(reserved.targets)} targets", Refusal.BROKEN)

    def _check_unchanged(self, key: MoveKey, request: SimRequest, page_generation: int) -> None:
        if self._moving(key) is not request or request.page_generation != page_generation:
            raise MoveRefused(f"{key}: its pages changed during the copy", Refusal.PREEMPTED)


def pack_state(request: SimRequest) -> bytes:
    """What a request takes with it beside tokens and KV. Times are of a clock that both ends share, as they do in
    simulation and on one machine; elsewhere they only decide who is preempted first."""
    return json.dumps({name: getattr(request, name) for name in STATE_NAMES}).encode()


def unpack_state(request: SimRequest, state: bytes) -> None:
    """Give it to the request at the destination. Raises MoveRefused if it is none."""
    try:
        values = json.loads(state)
        for name in STATE_NAMES:
            optional = name == "preempted_ns" and values[name] is None
            setattr(request, name, None if optional else int(values[name]))
    except (ValueError, KeyError, TypeError) as error:
        raise MoveRefused(
            f"state of {request.key} is not of a simulated engine: {error!r}", Refusal.INCOMPATIBLE
        ) from error
