"""The simulated engine: `MovableEngine` and `ReconfigurableEngine` on a timing model."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from meshift.backends.base import (
    Capability,
    Committed,
    DeltaSent,
    EngineFailure,
    EngineInfo,
    EngineListener,
    EngineLoad,
    EngineRequest,
    EngineStartError,
    FrozenRequest,
    KvMemoryNow,
    KvResized,
    MoveBegun,
    MoveKey,
    MoveRefused,
    Refusal,
    Reserved,
)
from meshift.backends.layouts import LayoutChange, LayoutCommitted, LayoutNow, LayoutProgress, LayoutRefused
from meshift.backends.sim import accounting
from meshift.backends.sim.clock import Clock
from meshift.backends.sim.core import EngineCore
from meshift.backends.sim.layouts import Layouts
from meshift.backends.sim.lifecycle import RequestState
from meshift.backends.sim.moves_in import MovesIn
from meshift.backends.sim.moves_out import MovesOut
from meshift.backends.sim.outbox import Outbox
from meshift.backends.sim.parameters import SimParameters
from meshift.backends.sim.pipeline import SimPipeline
from meshift.backends.sim.request import SimRequest
from meshift.backends.sim.resizing import Resizing
from meshift.backends.sim.tokens import Generation, TokenSource
from meshift.backends.sim.work import Emit
from meshift.kv_memory.layout import KvLayout
from meshift.kv_memory.transport.base import Transport, TransportError
from meshift.schemas.errors import CallerError, ContextTooLong, InvalidRequest, Unavailable, Unsupported
from meshift.schemas.identity import RequestKey
from meshift.schemas.instances import ModelInfo
from meshift.schemas.layouts import CommitMode, LayoutRefusal, split_of

DEFAULT_MODEL = ModelInfo(name="sim", context_tokens_max=16_384, vocabulary_size=32_000, layers=32)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a started engine is made of."""

    core: EngineCore
    clock: Clock
    outbox: Outbox
    moves_out: MovesOut | None
    moves_in: MovesIn | None
    resizing: Resizing
    layouts: Layouts | None


class SimEngine:
    """Runs on whichever loop starts it: in virtual time, or at the modelled pace on a real clock.

    `skip_steps` takes equal decode steps at once, which changes no time and no token. `emit="step"` delivers at every
    step (or skipped segment), `"edges"` only a request's first token after a prefill, and the rest with its end, its
    freeze, or `flush`. With a `transport`, which it starts and closes, requests can move; with `verify_moves` they
    carry a hash of their KV, which the destination compares. With a `pipeline` it has stages, whose layers move.

    `stop` strings need text, which an engine of token ids hasn't: they are left to the frontend. Penalties and
    `top_p`, `top_k`, `min_p` have no effect on the model's tokens, and log-probabilities are made up."""

    def __init__(
        self,
        parameters: SimParameters | None = None,
        model: ModelInfo = DEFAULT_MODEL,
        *,
        transport: Transport | None = None,
        pipeline: SimPipeline | None = None,
        skip_steps: bool = False,
        emit: Emit = "step",
        verify_moves: bool = False,
    ) -> None:
        self.parameters = parameters or SimParameters()
        self.model = model
        if self.parameters.token_low >= model.vocabulary_size:
            raise ValueError(f"token_low {self.parameters.token_low} is beyond {model.vocabulary_size} tokens")
        if pipeline is not None and pipeline.total != model.layers:
            raise ValueError(f"{pipeline.total} layers in the pipeline, {model.layers} in the model")
        self._transport = transport
        self._pipeline = pipeline
        self._skip_steps = skip_steps
        self._emit: Emit = emit
        self._verify_moves = verify_moves
        self._source = TokenSource(
            self.parameters.token_low,
            model.vocabulary_size,
            self.parameters.eos_token_id,
            self.parameters.eos_per_million,
        )
        self._parts: _Parts | None = None
        self._starting: asyncio.Future[None] | None = None
        self._down = ""
        """Why it serves no more."""

    # ---- Engine

    async def start(self, listener: EngineListener) -> EngineInfo:
        """Takes `cold_start_ns`. Raises EngineStartError if it is stopped or crashes meanwhile."""
        if self._parts is not None or self._starting is not None or self._down:
            raise EngineStartError(f"started before; {self._down or 'it runs'}")
        clock = Clock(asyncio.get_running_loop())
        self._starting = clock.future()
        timer = clock.call_at_ns(clock.now_ns() + self.parameters.cold_start_ns, _resolve, self._starting)
        try:
            await self._starting
        finally:
            timer.cancel()
        await self._start_transport()
        if self._down:
            raise EngineStartError(self._down)
        self._parts = self._assemble(clock, listener)
        return self._info()

    def submit(self, request: EngineRequest) -> None:
        """Queue a request."""
        core = self._require().core
        if core.requests.has_seen(request.key):
            raise InvalidRequest(f"{request.key} was submitted before", param="request_id")
        core.submit(self._build(request))

    def cancel(self, key: RequestKey) -> None:
        """End it as soon as the step allows."""
        if self._parts is not None and not self._down:
            self._parts.core.catch_up()
            request = self._parts.core.requests.get(key)
            if request is not None:
                self._parts.core.cancel(request)

    def load(self) -> EngineLoad:
        """As of now."""
        if self._parts is None:
            capacity = self.parameters.pages * self.parameters.page_size
            return EngineLoad(capacity, 0, 0, capacity, 0, 0, 0, 0, 0, 0)
        return accounting.snapshot(self._parts.core)

    async def check_integrity(self) -> None:
        """Raise AssertionError if pages leak or counters are wrong."""
        if self._parts is not None and not self._down:
            moves_in = self._parts.moves_in
            accounting.check(self._parts.core, moves_in.pages if moves_in is not None else 0)

    async def stop(self, deadline_s: float) -> None:
        """Ends at once, whatever the deadline."""
        self._end("stopped")
        if self._parts is not None:
            self._parts.outbox.close()
        if self._transport is not None:
            await self._transport.close()

    def held_tokens(self, key: RequestKey) -> int | None:
        """See `Engine.held_tokens`."""
        request = None if self._parts is None else self._parts.core.requests.get(key)
        if self._parts is None or request is None:
            return None
        if request.state is RequestState.WAITING:
            return 0
        return self._parts.core.counts(request)[0] if request.state is RequestState.RUNNING else None

    # ---- faults, and what a simulation may ask beside

    def crash(self, reason: str) -> None:
        """The engine dies: the listener gets the tokens up to now, then `on_failure`. A start under way fails."""
        if not self._down:
            self._end(reason)
            if self._parts is not None:
                self._parts.outbox.put(EngineFailure(reason))

    def hang(self) -> None:
        """The engine does no step any more and says nothing of it."""
        self._require().core.halt()

    def flush(self) -> None:
        """Deliver the tokens that exist by now."""
        self._require().core.flush()

    # ---- MovableEngine

    async def begin_move(self, key: MoveKey) -> MoveBegun:
        """Source: mark the request as moving."""
        return self._out().begin(key)

    async def send_delta(self, key: MoveKey, start: int, reserved: Reserved) -> DeltaSent:
        """Source: send the KV of tokens [start, now)."""
        return await self._out().send(key, start, reserved)

    async def freeze(self, key: MoveKey, start: int, reserved: Reserved | None) -> FrozenRequest:
        """Source: take it out of the batch at a step boundary, and send the rest."""
        return await self._out().freeze(key, start, reserved)

    async def release(self, key: MoveKey) -> None:
        """Source: the destination owns it; free its memory."""
        if self._parts is not None and self._parts.moves_out is not None and not self._down:
            self._parts.moves_out.release(key)

    async def resume(self, key: MoveKey, attempt: int) -> None:
        """Source: the move failed; go on here as `(attempt, hop - 1)`."""
        if self._parts is not None and self._parts.moves_out is not None and not self._down:
            await self._parts.moves_out.resume(key, attempt)

    async def learn_schema(self, json_schema: str) -> None:
        """Destination: nothing is compiled here."""

    async def reserve(
        self, key: MoveKey, layout: KvLayout, tokens: Sequence[int], slots: int, deadline_s: float
    ) -> Reserved:
        """Destination: promise room."""
        return self._in().reserve(key, layout, tokens, slots, deadline_s)

    async def commit(self, key: MoveKey, frozen: FrozenRequest, request: EngineRequest, timeout_s: float) -> Committed:
        """Destination: the request runs here from now on. Never waits, so that `timeout_s` is of no matter."""
        self._in().commit(key, frozen, request, self._build_arrival)
        return Committed(self._require().clock.unix_ns())

    async def abort(self, key: MoveKey) -> None:
        """Destination: free the reservation, refuse a later commit."""
        if self._parts is not None and self._parts.moves_in is not None and not self._down:
            self._parts.moves_in.abort(key)

    # ---- ResizableEngine

    async def resize_kv(self, capacity: int, *, preempt: bool = False) -> KvResized:
        """At the next step boundary."""
        return await self._require().resizing.resize(capacity, preempt)

    async def kv_memory(self) -> KvMemoryNow:
        """All of the capacity counts as resident."""
        return self._require().resizing.now()

    # ---- ReconfigurableEngine, with a pipeline

    async def layout(self) -> LayoutNow:
        """What there is, what is under way, what has ended."""
        return self._layouts().now()

    async def begin_layout(self, change: LayoutChange) -> None:
        """BEGIN."""
        self._layouts().begin(change)

    async def load_weights(self, change_id: str) -> None:
        """In the background."""
        self._layouts().load(change_id)

    async def start_kv_migration(self, change_id: str, bytes_per_s: float | None) -> None:
        """In the background."""
        self._layouts().copy(change_id, bytes_per_s)

    async def layout_progress(self, change_id: str) -> LayoutProgress:
        """How far it is."""
        return self._layouts().progress(change_id)

    async def commit_layout(self, change_id: str, commit: CommitMode, timeout_s: float) -> LayoutCommitted:
        """COMMIT, at the next step boundary."""
        return await self._layouts().commit(change_id, commit, timeout_s)

    async def abort_layout(self, change_id: str) -> None:
        """Undo it."""
        self._layouts().end(change_id)

    def break_layout(self, reason: str) -> None:
        """A fault: the change that is under way can only be aborted."""
        self._layouts().break_change(reason)

    # ---- inside

    def _assemble(self, clock: Clock, listener: EngineListener) -> _Parts:
        outbox = Outbox(clock, listener)
        core = EngineCore(self.parameters, clock, outbox.put, skip_steps=self._skip_steps, emit=self._emit)
        pages_max = self.parameters.pages
        if self._pipeline is not None and self._pipeline.capacity_max is not None:
            pages_max = self._pipeline.capacity_max // self.parameters.page_size
        resizing = Resizing(core, clock, pages_max)
        kv = self._layout() if self._transport is not None else None
        layouts = None if self._pipeline is None else Layouts(core, clock, self._pipeline, resizing, kv)
        if self._transport is None or kv is None:
            return _Parts(core, clock, outbox, None, None, resizing, layouts)
        moves_out = MovesOut(core, clock, outbox, self._transport, kv, self._verify_moves)
        return _Parts(core, clock, outbox, moves_out, MovesIn(core, clock, self._transport, kv), resizing, layouts)

    async def _start_transport(self) -> None:
        if self._transport is not None:
            try:
                await self._transport.start()
            except TransportError as error:
                raise EngineStartError(f"no data plane: {error}") from error

    def _info(self) -> EngineInfo:
        parameters = self.parameters
        return EngineInfo(
            name="sim",
            model=self.model,
            capacity=parameters.pages * parameters.page_size,
            page_size=parameters.page_size,
            pipeline_stages=1 if self._pipeline is None else len(self._pipeline.layers),
            capabilities=frozenset(self._capabilities()),
            layout=self._layout() if self._transport is not None else None,
        )

    def _capabilities(self) -> list[Capability]:
        moves = [Capability.MOVE_REQUESTS] if self._transport is not None else []
        return moves if self._pipeline is None else [*moves, Capability.CHANGE_LAYOUT]

    def _layout(self) -> KvLayout:
        """One cell a token: the slots of the hash chain, whichever stage holds which layers."""
        source = self._source
        weights = f"{self.model.name}/{source.low}-{source.vocabulary}/{source.eos_token_id}/{source.eos_per_million}"
        ranges = ((0, 1),) if self._pipeline is None else split_of(self._pipeline.layers)
        return KvLayout(ranges, ((0, 1),), 1, "uint32", weights)

    def _end(self, reason: str) -> None:
        if self._down:
            return
        if self._parts is not None:
            self._parts.core.halt()
            if self._parts.layouts is not None:
                self._parts.layouts.stop()
            if self._parts.moves_in is not None:
                self._parts.moves_in.end()
            self._parts.clock.break_waits(reason)
        elif self._starting is not None and not self._starting.done():
            self._starting.set_exception(EngineStartError(reason))
        self._down = reason

    def _require(self) -> _Parts:
        if self._parts is None or self._down:
            raise Unavailable(f"the engine does not run: {self._down or 'not started'}")
        return self._parts

    def _out(self) -> MovesOut:
        if self._parts is None or self._down or self._parts.moves_out is None:
            raise MoveRefused(self._down or "not started, or without a transport", Refusal.BROKEN)
        return self._parts.moves_out

    def _in(self) -> MovesIn:
        if self._parts is None or self._down or self._parts.moves_in is None:
            raise MoveRefused(self._down or "not started, or without a transport", Refusal.BROKEN)
        return self._parts.moves_in

    def _layouts(self) -> Layouts:
        parts = self._parts
        if parts is None or self._down:
            raise ConnectionError(f"the engine does not run: {self._down or 'not started'}")
        if parts.layouts is None:
            raise LayoutRefused("this engine has no pipeline", LayoutRefusal.UNSUPPORTED)
        return parts.layouts

    def _build(self, request: EngineRequest) -> SimRequest:
        """Raises InvalidRequest, ContextTooLong or Unsupported."""
        if request.sampling.json_schema is not None:
            raise Unsupported("a simulated engine's tokens have no text to obey a schema", param="json_schema")
        prompt, output, sampling = request.prompt, request.output, request.sampling
        if not len(prompt):
            raise InvalidRequest("the prompt is empty", param="prompt")
        for tokens, name in ((prompt, "prompt"), (output, "output")):
            if len(tokens) and not 0 <= min(tokens) <= max(tokens) < self.model.vocabulary_size:
                raise InvalidRequest(f"{name} has token ids outside [0, {self.model.vocabulary_size})", param=name)
        if len(output) >= sampling.max_new_tokens:
            raise InvalidRequest(f"{len(output)} of {sampling.max_new_tokens} tokens are there", param="output")
        total = len(prompt) + sampling.max_new_tokens
        # The last token's KV is never computed.
        capacity = self._require().core.pool.capacity * self.parameters.page_size
        limit = min(self.model.context_tokens_max, capacity + 1)
        if total > limit:
            raise ContextTooLong(f"{len(prompt)} + {sampling.max_new_tokens} tokens are more than {limit}")
        return SimRequest(request.key, Generation(self._source, prompt, output, sampling), request.priority)

    def _build_arrival(self, request: EngineRequest) -> SimRequest:
        """The same for a request that moves here. Raises MoveRefused."""
        if self._require().core.requests.has_seen(request.key):
            raise MoveRefused(f"{request.key} was here before", Refusal.UNKNOWN)
        try:
            return self._build(request)
        except CallerError as error:
            raise MoveRefused(f"{request.key}: {error}", Refusal.INCOMPATIBLE) from error


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
