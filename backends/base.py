"""The one seam between the mesh and an engine.

A worker drives an `Engine`: token ids in, token ids out. `meshift.backends.sglang` is the real one,
`meshift.backends.sim` a timing model; both pass `tests/contract/engine_suite.py`.

All methods are called on one event loop and none blocks it. The listener is called on that loop too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol, runtime_checkable

from meshift.kv_memory.layout import KvLayout
from meshift.kv_memory.transport.base import Address
from meshift.schemas.identity import RequestKey
from meshift.schemas.instances import ModelInfo
from meshift.schemas.memory import MemoryUnits
from meshift.schemas.requests import Finish, Priority, Sampling, TokenLogprob


class Capability(StrEnum):
    """What an engine can do beyond generating."""

    MOVE_REQUESTS = "move_requests"
    CHANGE_LAYOUT = "change_layout"
    """It is a `meshift.backends.layouts.ReconfigurableEngine`."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a started engine is."""

    name: str
    """`sglang` or `sim`."""
    model: ModelInfo
    capacity: int
    """KV capacity in tokens."""
    page_size: int
    """Tokens a page."""
    pipeline_stages: int = 1
    tensor_ranks: int = 1
    rank_pids: tuple[int, ...] = ()
    capabilities: frozenset[Capability] = frozenset()
    layout: KvLayout | None = None
    """Of an engine whose requests move."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request as the engine gets it."""

    key: RequestKey
    prompt: Sequence[int]
    output: Sequence[int]
    """Tokens that were generated before; generation goes on after them, as after a preemption: they count as
    output for limits and penalties, and are not emitted again."""
    sampling: Sampling
    priority: Priority = field(default_factory=Priority)


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """What one step (or several, if the engine skips) gave one request."""

    key: RequestKey
    start: int
    """Index of the first of `tokens` in the request's whole output (those of earlier attempts included)."""
    tokens: Sequence[int]
    finish: Finish | None = None
    logprobs: Sequence[TokenLogprob] | None = None
    """One a token, each with as many likeliest ones as `sampling.logprobs` says, if it isn't None: of the distribution
    that the token was drawn from (after penalties, temperature and schema), before top-p, top-k and min-p cut it."""
    queued_ns: int | None = None
    """With the first tokens, where the engine knows it: from the submission to the start of the prefill."""


class ClassUsage(NamedTuple):
    """The requests in the batch that have one execution priority."""

    execution: int
    running: int
    used: int
    """Their tokens with memory."""


class EngineLoad(NamedTuple):
    """A snapshot, in tokens unless said. used + cached + free + reserved = capacity."""

    capacity: int
    used: int
    cached: int
    free: int
    reserved: int
    running: int
    """Requests in the batch, those in prefill included."""
    waiting: int
    head_demand: int
    queued_demand: int
    step_count: int
    """Grows with every step; a watchdog compares it while something runs."""
    usages: tuple[ClassUsage, ...] = ()
    """By execution priority, ascending. Empty: nothing runs."""
    prefill_tokens: int = 0
    """Whose KV prefill steps have computed since the start: what was found in a cache, or moved here, doesn't count."""
    batch_full: bool = False
    """It admits nothing to its batch now, whatever is free: it keeps room for what runs to grow."""


@dataclass(frozen=True, slots=True)
class EngineFailure:
    """The engine is dead: its requests are lost here."""

    reason: str


class EngineListener(Protocol):
    """What the worker gives to the engine."""

    def on_step(self, events: Sequence[TokenEvent]) -> None:
        """One step's events. Events of one request come in order, without gap or repetition."""

    def on_failure(self, failure: EngineFailure) -> None:
        """Called at most once, and nothing after it."""


class Engine(Protocol):
    """Generates tokens."""

    async def start(self, listener: EngineListener) -> EngineInfo:
        """Bring it up until it can serve (weights loaded, warm). Raises `EngineStartError`."""

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Raises `InvalidRequest`, `ContextTooLong` (can never fit into model or capacity)
        or `Unsupported`; later trouble comes as a finish with reason `error`. A key may be submitted once."""

    def cancel(self, key: RequestKey) -> None:
        """End it as soon as the step allows: a finish with reason `cancelled` follows, unless its own finish is
        already on the way. Unknown keys are ignored."""

    def load(self) -> EngineLoad:
        """The newest snapshot; cheap."""

    def held_tokens(self, key: RequestKey) -> int | None:
        """Tokens of a request with KV now, also where the listener hears of tokens later; 0 while it waits; None in
        its prefill, out of the batch, or if it isn't here. Cheap."""

    async def check_integrity(self) -> None:
        """Raise AssertionError if memory isn't conserved, or, when nothing runs, not all free or cached."""

    async def stop(self, deadline_s: float) -> None:
        """End it and its processes, by force after `deadline_s`. Idempotent. No listener call follows."""


class EngineStartError(Exception):
    """The engine didn't come up; the message says why, with the tail of its log."""


# ---- resizing KV memory (PipeLive, section 4) ----


@dataclass(frozen=True, slots=True)
class KvMemoryNow:
    """What holds an instance's KV, beside what its load says."""

    request_tokens_max: int
    """Prompt plus output of one request."""
    resident_bytes: int
    """Held by all ranks, as the system counts: memory comes with the first write to it."""
    units: MemoryUnits | None
    """None: SGLang's own buffers, one slab a layer, shared out token by token."""


@dataclass(frozen=True, slots=True)
class KvResized:
    """What came of a resize; in tokens unless said."""

    capacity: int
    """Now."""
    request_tokens_max: int
    """Prompt plus output of one request, from now on."""
    evicted: int
    """Of cached prefixes, which go first."""
    preempted: int
    """Requests that lost their memory and wait again."""
    released_bytes: int
    """Given back to the system, by all ranks."""
    resident_bytes: int
    """Held by all ranks, as the system counts."""
    reason: str
    """Why it isn't the capacity that was asked for; empty if it is."""
    duration_ns: int
    """Of the slowest rank's step thread."""
    units: MemoryUnits | None = None
    """See `KvMemoryNow`."""


@runtime_checkable
class ResizableEngine(Engine, Protocol):
    """An engine whose KV memory grows and shrinks while it runs."""

    async def resize_kv(self, capacity: int, *, preempt: bool = False) -> KvResized:
        """Come as close to `capacity` tokens (whole pages) as can be, at one point of the request stream on all ranks.
        Cached prefixes go first; running requests keep their memory unless `preempt`. Raises TimeoutError,
        ConnectionError, Unavailable."""

    async def kv_memory(self) -> KvMemoryNow:
        """Ask all ranks what they hold; `load` is as new afterwards. Raises as `resize_kv`."""


# ---- moving requests (Llumnix, section 4.2) ----


@dataclass(frozen=True, slots=True)
class MoveKey:
    """One try to move a request. `hop` is the one that the destination will own."""

    request_id: str
    attempt: int
    hop: int

    @property
    def destination(self) -> RequestKey:
        """The request's key once it is there."""
        return RequestKey(self.request_id, self.attempt, self.hop)

    @property
    def source(self) -> RequestKey:
        """The request's key before."""
        return RequestKey(self.request_id, self.attempt, self.hop - 1)


@dataclass(frozen=True, slots=True)
class MoveBegun:
    """The source agrees to the move."""

    tokens: tuple[int, ...]
    """Prompt and output whose KV exists now: the destination matches its prefix cache with them. Empty for a request
    that waits (new or preempted): it has no KV and moves as state only."""
    growth_max: int
    """Tokens that may still come."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """What the destination promises, until its deadline."""

    slots: int
    """Tokens for which there is room now, from index 0."""
    cached: int
    """Leading tokens whose KV the destination has already: nothing to send for them."""
    layout: KvLayout
    """The destination's."""
    targets: tuple[Address, ...]
    """Where its ranks receive: one address a pair, in the order of `plan_pairs` over both layouts. Renewals of one
    reservation repeat them."""


@dataclass(frozen=True, slots=True)
class DeltaSent:
    """One round of the copy, applied by every rank of the destination."""

    start: int
    end: int
    """KV of tokens [start, end) was sent; `end` is the next round's start."""
    byte_count: int
    gather_ns: int
    """What reading it took the slowest rank, on whichever thread."""
    transfer_ns: int
    """From the first read until the last rank has applied it."""


@dataclass(frozen=True, slots=True)
class FrozenRequest:
    """A request outside its batch, whole: what the destination needs beside the KV."""

    computed: int
    """Tokens whose KV exists and is at the destination; 0 if it moves as state only, to be computed there."""
    output: tuple[int, ...]
    state: bytes
    """The engine's own; opaque to the mesh. Whole in itself: page sizes, ranks and processes of the ends may differ."""
    delta: DeltaSent | None
    """The last round."""
    kv_hashes: tuple[int, ...] = ()
    """Of the whole rectangle of each pair, in `plan_pairs` order, if the engine verifies moves: the destination
    compares them with what it finds in its own memory before it commits."""
    frozen_ns: int = 0
    """Unix time at which the source's last step with it had ended."""


@dataclass(frozen=True, slots=True)
class Committed:
    """The destination owns it."""

    runnable_ns: int
    """Unix time from which the destination may step it."""


class Refusal(StrEnum):
    """Why a move can't go on, for those who decide what now."""

    UNKNOWN = "unknown"
    """No such request, move or reservation here (any more): finished, cancelled, ended by deadline."""
    PREEMPTED = "preempted"
    """It lost its memory; it may be moved as state only."""
    BUSY = "busy"
    """Its prefill is under way, or it moves already: try later."""
    NO_ROOM = "no_room"
    INCOMPATIBLE = "incompatible"
    """These two instances, or this kind of request, never."""
    BROKEN = "broken"
    """The data plane failed, a deadline passed, or the bytes differ."""


class MoveRefused(Exception):
    """Not now. The request is where it was, as it was."""

    def __init__(self, message: str, refusal: Refusal = Refusal.UNKNOWN) -> None:
        super().__init__(message)
        self.refusal = refusal


@runtime_checkable
class MovableEngine(Engine, Protocol):
    """An engine whose requests move. Order at the source: begin_move, send_delta..., freeze, then release or resume;
    at the destination: reserve..., then commit or abort. Every method but release, resume and abort raises
    `MoveRefused`; those three are idempotent. Many moves may be under way at once, in both directions."""

    async def begin_move(self, key: MoveKey) -> MoveBegun:
        """Source: mark the request as moving. One that is being prefilled is refused as BUSY."""

    async def send_delta(self, key: MoveKey, start: int, reserved: Reserved) -> DeltaSent:
        """Source: send the KV of tokens [start, now), while it goes on; returns when it is applied. Refuses (PREEMPTED,
        UNKNOWN) if its pages changed meanwhile; if there is more than `reserved.slots` takes, sends what fits."""

    async def freeze(self, key: MoveKey, start: int, reserved: Reserved | None) -> FrozenRequest:
        """Source: take it out of the batch (or the queue) at a step boundary, and send the rest, [start, now); returns
        when that is applied. Without a reservation it is to be computed anew at the destination. All tokens up to the
        freeze reach the listener first. If it raises, the request goes on as before."""

    async def release(self, key: MoveKey) -> None:
        """Source: the destination owns it; free its memory (its KV may stay as a cached prefix). No event follows."""

    async def resume(self, key: MoveKey, attempt: int) -> None:
        """Source: the move failed, or never began; go on here, as `(attempt, hop - 1)`, frozen or not. Tokens of the
        old attempt reach the listener under the old key first."""

    async def learn_schema(self, json_schema: str) -> None:
        """Destination: a request that obeys this schema is to come; returns when its commit won't wait for it any
        more. A schema that can't be obeyed is no error here. May be cancelled."""

    async def reserve(
        self, key: MoveKey, layout: KvLayout, tokens: Sequence[int], slots: int, deadline_s: float
    ) -> Reserved:
        """Destination: promise room for `slots` tokens in all, of which `tokens` are the first; `layout` is the
        source's. Called again it grows and renews. With 0 slots: for state only."""

    async def commit(self, key: MoveKey, frozen: FrozenRequest, request: EngineRequest, timeout_s: float) -> Committed:
        """Destination: the request runs here from now on, as `key.destination`; the first event starts at
        `len(frozen.output)`. All of [0, frozen.computed) must have been applied by every rank. If it raises, the
        reservation is as before, until abort or its deadline."""

    async def abort(self, key: MoveKey) -> None:
        """Destination: quiesce writers, then free the reservation. A later reserve or commit of `key` is refused."""
