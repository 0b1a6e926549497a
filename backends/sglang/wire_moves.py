"""What worker and ranks say about requests that move; see `wire`.

A command names the request by the id that SGLang has for it (`rid`), a reservation by the one that it will have.
Every rank answers a command with its `nonce` and the iteration at which it acted: `Refused`, or what the command asks
for. What a rank's data thread has to say (`Sent`, `Quiet`, `Applied`) comes by a socket of its own, so that its order
with the rank's other reports means nothing.
"""

import msgspec

STATE_VERSION = 1


class Share(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The part of the KV matrix that a rank holds, and its kind of cells."""

    layer_start: int
    layer_end: int
    head_start: int
    head_end: int
    head_dim: int
    dtype: str
    """As torch names it."""
    obstacle: str = ""
    """Why its KV can't move; empty if it can."""


class PairPart(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One pair of ranks, as one end sees it: layers and KV heads that this end's `rank` shares with the other's."""

    pair: int
    """Index in `plan_pairs`."""
    rank: int
    transfer_id: str
    layer_start: int
    layer_end: int
    head_start: int
    head_end: int


class TargetAddress(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """`kv_memory.transport.base.Address`."""

    scheme: str
    location: str
    rank: int
    token: str


class PairTarget(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A pair at its source, and where its destination receives."""

    part: PairPart
    address: TargetAddress


# ---- commands at the source ----


class BeginMove(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="meshift.begin"):
    """Say how far the request is."""

    nonce: int
    rid: str


class SendDelta(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="meshift.send"):
    """Gather the KV of tokens [start, now) up to `end_max`, and have it sent. `Gathered`, then `Sent`."""

    nonce: int
    sent_nonce: int
    rid: str
    generation: int
    """The request's preemptions when the move began: with another count its pages are others."""
    start: int
    end_max: int
    targets: list[PairTarget]
    timeout_s: float


class Freeze(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="meshift.freeze"):
    """Take the request out of batch or queue at a step boundary; with `copies`, send the rest as `SendDelta` does.
    `FrozenAt`, then `Sent`."""

    nonce: int
    sent_nonce: int
    rid: str
    generation: int
    copies: bool
    start: int
    end_max: int
    hash_start: int
    """Hash the pairs' KV from this token on; -1: don't."""
    targets: list[PairTarget]
    timeout_s: float


class Release(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="meshift.release"):
    """The frozen request runs elsewhere. `Done`."""

    nonce: int
    rid: str


class Resume(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="meshift.resume"):
    """The request goes on here, frozen or not. `Done`."""

    nonce: int
    rid: str


# ---- commands at the destination ----


class Reserve(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="meshift.reserve"):
    """Keep room for `slots` tokens, the first of which are `tokens` (packed). The first one opens the transfers of
    `parts`, a later one makes it larger. `ReservedAt`."""

    nonce: int
    rid: str
    tokens: bytes
    slots: int
    parts: list[PairPart]


class HashReserved(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="meshift.hash"):
    """Hash what lies in the reservation's slots for tokens [start, end). `Hashes`."""

    nonce: int
    rid: str
    start: int
    end: int


class Quiesce(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="meshift.quiesce"):
    """Receive nothing more for the reservation. `Quiet`, once nothing is being written."""

    nonce: int
    rid: str


class Unreserve(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="meshift.unreserve"):
    """Free a reservation that is quiet on all ranks. `Done`."""

    nonce: int
    rid: str


class MovedState(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What a request takes with it beside its tokens, its KV and what its `EngineRequest` says. The state of grammar,
    penalties and stop conditions follows from the tokens; that of the random numbers from seed and position."""

    version: int
    seed: int
    cached_tokens: int
    preemptions: int
    preemption_loss_ns: int
    waits_ns: int | None
    """For how long it waits after a preemption; None if it doesn't."""


class LearnSchema(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="meshift.learn"):
    """Compile a schema that nobody asks for yet, and put the result aside. `Learned`, when that is done."""

    nonce: int
    json_schema: str


class KeepSchema(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="meshift.keep"):
    """All ranks have learned it: each puts it among those that are compiled, in the same iteration. Nobody answers."""

    json_schema: str


class Recall(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="meshift.recall"):
    """Give up a commit whose schema is still being compiled. Only the commit answers."""

    rid: str


# ---- reports ----


class Refused(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="refused"):
    """Nothing was changed."""

    rank: int
    nonce: int
    iteration: int
    refusal: str
    message: str


class Begun(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="begun"):
    """`tokens`: those with KV, packed; none of a request that waits."""

    rank: int
    nonce: int
    iteration: int
    tokens: bytes
    growth_max: int
    generation: int


class Gathered(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="gathered"):
    """This rank's parts of tokens [start, end) are on their way, and were the request's when all of it was read."""

    rank: int
    nonce: int
    iteration: int
    start: int
    end: int
    byte_count: int


class PairHash(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """`kv_hash` of a pair."""

    pair: int
    hash: str


class FrozenAt(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="frozen"):
    """All its tokens were reported before this. `end` is the count of tokens with KV, 0 of one without."""

    rank: int
    nonce: int
    iteration: int
    start: int
    end: int
    byte_count: int
    output: bytes
    state: MovedState
    hashes: list[PairHash]
    frozen_ns: int


class Sent(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="sent"):
    """What was gathered is applied at the destination, or the transfer is broken. By the data thread."""

    rank: int
    nonce: int
    error: str
    gather_ns: int
    transfer_ns: int


class ReservedAt(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="reserved"):
    """Room for `slots` tokens, of which the first `cached` are there already."""

    rank: int
    nonce: int
    iteration: int
    cached: int
    slots: int
    targets: list[tuple[int, TargetAddress]]
    """(pair, address) of this rank's pairs."""


class Hashes(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="hashes"):
    """Of this rank's pairs."""

    rank: int
    nonce: int
    iteration: int
    hashes: list[PairHash]


class CommittedAt(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="committed"):
    """The request runs here, or waits here."""

    rank: int
    nonce: int
    iteration: int
    runnable_ns: int


class Done(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="done"):
    """It is so."""

    rank: int
    nonce: int
    iteration: int


class Learned(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="learned"):
    """The schema is compiled, or can't be."""

    rank: int
    nonce: int
    iteration: int


class Quiet(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="quiet"):
    """No slot of the reservation is written any more. By the data thread."""

    rank: int
    nonce: int


class Applied(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="applied"):
    """All KV of tokens [0, tokens) of a pair lies in its slots. By the data thread."""

    rank: int
    rid: str
    pair: int
    tokens: int


SourceCommand = BeginMove | SendDelta | Freeze | Release | Resume
DestinationCommand = Reserve | HashReserved | Quiesce | Unreserve | LearnSchema | KeepSchema | Recall
Answer = Refused | Begun | Gathered | FrozenAt | Sent | ReservedAt | Hashes | CommittedAt | Done | Learned | Quiet
