"""Messages about moving a running request from its owner, the source, to another instance, the destination.

A move is named by the identity that the destination will own: `(request_id, attempt, hop)`, the source owning hop - 1.
`docs/moves.md` tells how they follow one another.
"""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from meshift.schemas.base import Message, PackedTokens, Part
from meshift.schemas.identity import FrontendRef, Owner, RequestKey
from meshift.schemas.limits import (
    JSON_SCHEMA_CHARS_MAX,
    MOVE_PAIRS_MAX,
    MOVE_STATE_BYTES_MAX,
    MOVES_LISTED_MAX,
    REASON_CHARS_MAX,
)
from meshift.schemas.requests import LogprobColumns, Priority, RequestId, Sampling

Reason = Annotated[str, Field(max_length=REASON_CHARS_MAX)]
Count = Annotated[int, Field(ge=0)]
Span = tuple[Count, Count]
"""[start, end)."""


class MoveMode(StrEnum):
    """How the request's KV gets there."""

    LIVE = "live"
    """Copied in rounds while the request goes on; it stops for the last of them only."""
    BLOCKING = "blocking"
    """Copied while it is stopped."""
    RECOMPUTE = "recompute"
    """Not copied: computed anew at the destination."""


class MoveRefusal(StrEnum):
    """Why a move didn't come about."""

    UNKNOWN = "unknown"
    """No such request, move or reservation there (any more)."""
    PREEMPTED = "preempted"
    """It lost its memory during the move."""
    BUSY = "busy"
    """Its prefill is under way, it moves already, or too many others do."""
    NO_ROOM = "no_room"
    INCOMPATIBLE = "incompatible"
    """Never between these two: another model, layout or capability."""
    BROKEN = "broken"
    """The data plane failed, or the bytes differ."""
    ENDED = "ended"
    """It finished, or was cancelled, meanwhile."""
    STALE = "stale"
    """Its frontend has given this owner up, or the destination is another incarnation."""
    DRAINING = "draining"
    """The destination takes nothing any more."""
    UNREACHABLE = "unreachable"
    """The destination doesn't answer."""
    DEADLINE = "deadline"
    RETRY = "retry"
    """The layout of one of them changes just now, or has changed since this move began: try again."""
    NO_DESTINATION = "no_destination"
    """No instance can take it now."""


class MoveOutcome(StrEnum):
    """What became of the request."""

    MOVED = "moved"
    STAYED = "stayed"
    """The source goes on with it, as if nothing had happened."""
    ENDED = "ended"
    """Finished, cancelled or superseded meanwhile: nobody goes on with it in this attempt."""
    REFUSED = "refused"
    """The source didn't begin."""


class _Move(Part):
    """Names one move."""

    request_id: RequestId
    attempt: int = Field(ge=1)
    hop: int = Field(ge=1)
    """The destination's."""
    source: Owner

    @property
    def destination_key(self) -> RequestKey:
        """What the request is called at the destination."""
        return RequestKey(self.request_id, self.attempt, self.hop)

    @property
    def source_key(self) -> RequestKey:
        """What it was called before."""
        return RequestKey(self.request_id, self.attempt, self.hop - 1)


# ---- orders, and what operators see


class MoveOrder(Message):
    """Operator or scheduler -> source: move this request. Answered with a MoveReport."""

    kind: Literal["move_order"] = "move_order"
    owner: Owner
    """Whom it is meant for; another incarnation refuses with `stale`."""
    request_id: RequestId
    destination: Owner | None = None
    """None: wherever there is room."""
    mode: MoveMode = MoveMode.LIVE
    deadline_s: float = Field(default=30.0, gt=0.0, le=3_600.0, allow_inf_nan=False)
    """Of the whole move, from the order's arrival. A request whose commit is under way then is decided first."""
    wait: bool = True
    """Answer when the move has ended; else when it has begun."""


class MoveFigures(Part):
    """What a move took, so far."""

    rounds: Count = 0
    """The last one, with the freeze, included."""
    tokens: Count = 0
    """Whose KV was sent."""
    byte_count: Count = 0
    gather_ns: Count = 0
    """That reading it from the source's memory took."""
    transfer_ns: Count = 0
    frozen_ns: Count = 0
    """From the source's last step to runnable at the destination; 0 if it isn't, or is computed there first."""
    duration_ns: Count = 0
    """From the order to the end, or to now."""


class MoveReport(Message):
    """Source -> whoever ordered or asks: one move."""

    kind: Literal["move_report"] = "move_report"
    request_id: RequestId
    attempt: Count
    hop: Count
    source: Owner
    destination: Owner | None
    mode: MoveMode
    """As it was done: a request without KV moves as if by `recompute`, whatever was ordered."""
    phase: str
    """Where it is now: a state of the source's table (`docs/moves.md`)."""
    outcome: MoveOutcome | None = None
    """None while it is under way."""
    refusal: MoveRefusal | None = None
    reason: Reason = ""
    figures: MoveFigures = MoveFigures()


class MovesRequest(Message):
    """Operator -> worker: which moves?"""

    kind: Literal["moves_request"] = "moves_request"


class MovesReply(Message):
    """Worker -> operator."""

    kind: Literal["moves_reply"] = "moves_reply"
    owner: Owner
    running: tuple[MoveReport, ...] = Field(default=(), max_length=MOVES_LISTED_MAX)
    """Out of this instance, oldest first."""
    ended: tuple[MoveReport, ...] = Field(default=(), max_length=MOVES_LISTED_MAX)
    """The newest ones, newest last."""
    incoming: Count = 0
    """Reservations of moves into it."""


# ---- source and destination


class MoveLayout(Part):
    """How the ranks of an instance share the KV matrix; see `meshift.kv_memory.layout.KvLayout`."""

    layer_ranges: tuple[Span, ...] = Field(min_length=1, max_length=MOVE_PAIRS_MAX)
    head_ranges: tuple[Span, ...] = Field(min_length=1, max_length=MOVE_PAIRS_MAX)
    head_dim: Count
    dtype: Annotated[str, Field(max_length=64)]
    weights: Annotated[str, Field(max_length=1024)]


class MoveTarget(Part):
    """Where a rank receives; see `meshift.kv_memory.transport.base.Address`."""

    scheme: Annotated[str, Field(max_length=64)]
    location: Annotated[str, Field(max_length=4096)]
    rank: Count = 0
    token: Annotated[str, Field(max_length=4096)] = ""


class MoveRoom(Part):
    """What the destination promises, until the deadline of its newest renewal."""

    slots: Count
    """Tokens for which there is room, from index 0."""
    cached: Count
    """Leading tokens whose KV is there already."""
    layout: MoveLayout
    targets: tuple[MoveTarget, ...] = Field(default=(), max_length=MOVE_PAIRS_MAX)
    epoch: Count = 0
    """Of the destination's layout: the move pins it."""


class MoveReserve(Message, _Move):
    """Source -> destination: room for `slots` tokens, please. Again for each round: it grows and renews."""

    kind: Literal["move_reserve"] = "move_reserve"
    owner: Owner
    """The destination."""
    layout: MoveLayout
    """The source's."""
    tokens: PackedTokens
    """Those whose KV exists, for the destination's prefix cache; none for a move of state only."""
    slots: Count
    """0: a move of state only."""
    json_schema: str | None = Field(default=None, max_length=JSON_SCHEMA_CHARS_MAX)
    """That the request's output obeys. The destination answers when it has compiled it: before the freeze."""
    epoch: Count | None = None
    """Of the destination's layout, as it was told before; None: not yet."""
    deadline_s: float = Field(gt=0.0, le=3_600.0, allow_inf_nan=False)


class MoveReserveReply(Message):
    """Destination -> source: room, or why not."""

    kind: Literal["move_reserve_reply"] = "move_reserve_reply"
    owner: Owner
    room: MoveRoom | None
    """None: refused."""
    refusal: MoveRefusal | None
    reason: Reason = ""


class MoveCommit(Message, _Move):
    """Source -> destination: it is yours. Idempotent; what is refused once is refused for ever."""

    kind: Literal["move_commit"] = "move_commit"
    owner: Owner
    """The destination."""
    frontend: FrontendRef
    lease_s: float = Field(ge=0.0, le=86_400.0, allow_inf_nan=False)
    """What is left of its frontend's lease."""
    prompt: PackedTokens
    output: PackedTokens
    """All of it, those of earlier attempts included."""
    base: Count
    """Index of the first output token of this attempt: from there on the new owner can be asked."""
    logprobs: LogprobColumns | None = None
    """Of the output from `base` on, as row 0, if the request asked for them."""
    sampling: Sampling
    priority: Priority = Priority()
    computed: Count
    """Tokens whose KV is there; 0: to be computed."""
    state: Annotated[bytes, Field(max_length=MOVE_STATE_BYTES_MAX)]
    """The engine's own."""
    kv_hashes: tuple[int, ...] = Field(default=(), max_length=MOVE_PAIRS_MAX)
    epoch: Count = 0
    """Of the destination's layout, as it was told."""
    timeout_s: float = Field(gt=0.0, le=3_600.0, allow_inf_nan=False)


class MoveCommitReply(Message):
    """Destination -> source: it runs here, or why not (then it never will)."""

    kind: Literal["move_commit_reply"] = "move_commit_reply"
    owner: Owner
    refusal: MoveRefusal | None
    """None: committed."""
    reason: Reason = ""
    runnable_ns: Count = 0
    """Unix time from which it may be stepped."""


class MoveQuestion(Message, _Move):
    """Source -> destination, when the answer to a commit was lost: have you committed? If not, it never will: the
    question aborts."""

    kind: Literal["move_question"] = "move_question"
    owner: Owner


class MoveAnswer(Message):
    """Destination -> source."""

    kind: Literal["move_answer"] = "move_answer"
    owner: Owner
    committed: bool
    runnable_ns: Count = 0


class MoveAbort(Message, _Move):
    """Source -> destination: it is not and will not be yours. What was committed nevertheless is cancelled."""

    kind: Literal["move_abort"] = "move_abort"
    owner: Owner
    reason: Reason = ""


class MoveClosed(Message):
    """Destination -> source: these are over and acknowledged, or cancelled; the source may forget where they went."""

    kind: Literal["move_closed"] = "move_closed"
    owner: Owner
    """The source."""
    destination: Owner
    keys: tuple[RequestKey, ...]
    """The destination's."""


# ---- source and frontend


class Fence(Message, _Move):
    """Source -> frontend, the arbiter where source and destination can't agree: who owns it?"""

    kind: Literal["fence"] = "fence"
    frontend: FrontendRef
    destination: Owner


class FenceVerdict(StrEnum):
    """Who owns the request."""

    MOVED = "moved"
    """The destination: its tokens have come."""
    RAISED = "raised"
    """The source, under a new attempt; everything of the old one is stale."""
    GONE = "gone"
    """Neither: it has ended, or goes on elsewhere."""


class FenceReply(Message):
    """Frontend -> source. The same question gets the same answer again."""

    kind: Literal["fence_reply"] = "fence_reply"
    frontend: FrontendRef
    verdict: FenceVerdict
    attempt: Count = 0
    """The source's new one, where it was raised."""
