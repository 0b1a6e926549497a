"""The source's end of request moves."""

import asyncio
import json
from collections.abc import Sequence
from zlib import crc32

from meshift.backends.base import DeltaSent, FrozenRequest, MoveBegun, MoveKey, MoveRefused
from meshift.backends.sim.clock import NANOSECONDS, Clock
from meshift.backends.sim.core import EngineCore
from meshift.backends.sim.lifecycle import RequestState
from meshift.backends.sim.outbox import Outbox
from meshift.backends.sim.request import SimRequest
from meshift.kv_memory.rectangle import Rectangle
from meshift.kv_memory.transport.base import Address, Patch, Transport, TransportError


def transfer_id(key: MoveKey) -> str:
    """The name of the move's transfer, the same at both ends."""
    return f"{key.request_id}/{key.attempt}.{key.hop}"


class MovesOut:
    """A request's move is an attribute of the request: when it ends or is preempted, so does the move."""

    def __init__(self, core: EngineCore, clock: Clock, outbox: Outbox, transport: Transport) -> None:
        self._core = core
        self._clock = clock
        self._outbox = outbox
        self._transport = transport
        self._gather_free_ns = 0
        """When the rounds that are being gathered are done: they take turns."""

    def begin(self, key: MoveKey) -> MoveBegun:
        """Raises MoveRefused unless the request is decoding here and not moving."""
        core = self._core
        core.catch_up()
        request = core.requests.get(key.source)
        if request is None or request.state is not RequestState.RUNNING or request.cancelled:
            raise MoveRefused(f"{key.source} is {'not here' if request is None else request.state.name.lower()}")
        if request.move is not None:
            raise MoveRefused(f"{key.source} moves already, as hop {request.move.hop}")
        core.start_move(request, key)
        computed, generated = core.counts(request)
        return MoveBegun(request.generation.first(computed), request.generation.sampling.max_new_tokens - generated)

    async def send(self, key: MoveKey, start: int, targets: Sequence[Address]) -> DeltaSent:
        """One round. Raises MoveRefused when the transfer breaks, too."""
        request = self._moving(key)
        end = self._core.counts(request)[0]
        if not 0 <= start <= end or len(targets) != 1:
            raise MoveRefused(f"{key}: tokens [{start}, {end}) to {len(targets)} targets")
        parameters, page_generation = self._core.parameters, request.page_generation
        frozen = request.state is RequestState.FROZEN
        cost_ns = max(parameters.copy_ns(end - start), parameters.cutover_ns if frozen else 0)
        self._gather_free_ns = max(self._gather_free_ns, self._clock.now_ns()) + cost_ns
        await self._clock.sleep_until(self._gather_free_ns)
        self._check_unchanged(key, request, page_generation)
        payload = request.generation.slots(start, end)
        checksum = crc32(payload)
        rectangle = Rectangle(0, 1, start, end, 0, 1)
        patch = Patch(transfer_id(key), end, page_generation, rectangle, payload, checksum)
        try:
            await self._transport.send(targets[0], patch, timeout_s=parameters.send_timeout_ns / NANOSECONDS)
        except TransportError as error:
            raise MoveRefused(f"{key}: {error}") from error
        self._check_unchanged(key, request, page_generation)
        return DeltaSent(start, end, end, (end - start) * parameters.kv_token_bytes, checksum)

    async def freeze(self, key: MoveKey) -> FrozenRequest:
        """Raises MoveRefused if it ends or is preempted at that boundary."""
        request = self._moving(key)
        if request.state is not RequestState.RUNNING or request.freeze_waiter is not None:
            raise MoveRefused(f"{key}: frozen already")
        if not await self._clock.wait(self._core.freeze(request)):
            raise MoveRefused(f"{key}: ended or preempted before it froze")
        self._moving(key)
        output = request.generation.output(0, request.generated)
        return FrozenRequest(request.computed, output, pack_state(request))

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
            self._core.flush([request])
        while self._outbox.pending:
            await asyncio.sleep(0)
            self._core.catch_up()
        request = self._core.requests.get(key.source)
        if request is None or request.move not in (key, None):
            return
        self._core.end_move(request)
        if attempt != request.key.attempt:
            self._core.requests.rekey(request, request.key._replace(attempt=attempt))
        if request.state is RequestState.FROZEN:
            self._core.thaw(request)

    def _moving(self, key: MoveKey) -> SimRequest:
        self._core.catch_up()
        request = self._core.requests.get(key.source)
        if request is None or request.move != key:
            raise MoveRefused(f"{key} is no move of a request here: it ended, was preempted, or never began")
        return request

    def _check_unchanged(self, key: MoveKey, request: SimRequest, page_generation: int) -> None:
        if self._moving(key) is not request or request.page_generation != page_generation:
            raise MoveRefused(f"{key}: its pages changed during the copy")


def pack_state(request: SimRequest) -> bytes:
    """What a request takes with it beside tokens and KV. Times are of a clock that both ends share, as they do in
    simulation and on one machine; elsewhere they only decide who is preempted first."""
    state = {
        "admitted_ns": request.admitted_ns,
        "arrived_ns": request.arrived_ns,
        "preemptions": request.preemptions,
        "loss_ns": request.loss_ns,
    }
    return json.dumps(state).encode()


def unpack_state(request: SimRequest, state: bytes) -> None:
    """Give it to the request at the destination. Raises MoveRefused if it is none."""
    try:
        values = json.loads(state)
        for name in ("admitted_ns", "arrived_ns", "preemptions", "loss_ns"):
            setattr(request, name, int(values[name]))
    except (ValueError, KeyError, TypeError) as error:
        raise MoveRefused(f"state of {request.key} is not of a simulated engine: {error!r}") from error
