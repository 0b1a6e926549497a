"""What worker and ranks say to each other: msgpack arrays with a tag, over local zmq sockets.

Commands ride in SGLang's own request stream (the socket on which its tokenizer process would write), so they keep
their order with everything else in it, reach every rank, and are acted on by all ranks in the same iteration.
Reports go from each rank straight to the worker. This module imports neither SGLang nor torch: the worker's
process stays light, and SGLang's internals stay in the ranks.
"""

import re
from typing import Final, get_args

import msgspec

from meshift.backends.sglang import wire_layers
from meshift.backends.sglang import wire_moves as moves
from meshift.schemas.identity import RequestKey

# ---- commands: worker -> all ranks, in order ----


class SamplingFields(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """SGLang's sampling parameters. `seed` is always set: one that the worker drew for an unseeded request keeps
    all ranks and all later owners on one random stream."""

    max_new_tokens: int
    min_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    stop: list[str]
    stop_token_ids: list[int]
    logit_bias: dict[str, float]
    ignore_eos: bool
    seed: int
    logprobs: int | None
    json_schema: str | None


class Submit(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="meshift.submit"):
    """Run a request. `ticket` names it in reports; `prompt` and `output` are packed token ids."""

    ticket: int
    rid: str
    prompt: bytes
    output: bytes
    sampling: SamplingFields
    priority: int


class Cancel(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="meshift.cancel"):
    """End a request."""

    rid: str


class CheckIntegrity(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="meshift.check"):
    """Every rank reports on its memory as it is in this iteration."""

    nonce: int


class FlushCache(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="meshift.flush"):
    """Drop all cached prefixes, if nothing runs."""


class ResizeKv(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="meshift.resize"):
    """Change the number of KV slots; each rank answers with `KvResized`."""

    nonce: int
    capacity: int
    """In tokens; whole pages of them."""
    preempt: bool
    """Whether running requests may lose their memory for it."""


class AskMemory(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="meshift.memory"):
    """Every rank says what holds its KV: `KvMemory`."""

    nonce: int


class Commit(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="meshift.commit"):
    """Run a request that has moved here: with its KV, if its first `computed` tokens have theirs in the reservation of
    that `rid`, or by computing all of it, if `computed` is 0. `CommittedAt`."""

    nonce: int
    submit: Submit
    computed: int
    state: moves.MovedState


Command = (
    Submit
    | Cancel
    | CheckIntegrity
    | FlushCache
    | ResizeKv
    | AskMemory
    | Commit
    | moves.SourceCommand
    | moves.DestinationCommand
    | wire_layers.LayerCommand
)
COMMANDS: Final = get_args(Command)

# ---- reports: rank -> worker ----


class RankPhase(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="phase"):
    """How far a starting rank is."""

    rank: int
    phase: str


class RankReady(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="ready"):
    """A rank enters its loop."""

    rank: int
    capacity: int
    page_size: int
    request_tokens_max: int
    """Prompt plus output of one request."""
    vocabulary_size: int
    layers: int
    obeys_schemas: bool
    """Whether the model's tokenizer lets output be constrained."""
    share: moves.Share
    movable: wire_layers.LayerFacts = wire_layers.LayerFacts(obstacle="unknown")


WAITING_TOLD_MAX = 64


class LoadSnapshot(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="load"):
    """Rank 0's accounting, in tokens unless said; see `EngineLoad`."""

    capacity: int
    used: int
    cached: int
    free: int
    reserved: int
    running: int
    waiting: int
    head_demand: int
    queued_demand: int
    step_count: int
    submits_seen: int
    """Submits that the ranks have taken out of the stream so far."""
    prefill_tokens: int = 0
    batch_full: bool = False
    waiting_rids: list[str] = []
    """Who waits, those that were preempted included: the first of the queue, `WAITING_TOLD_MAX` at most."""


class FinishRow(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The finish of the request in row `row` of a StepReport."""

    row: int
    reason: str
    matched_stop: str | int | None
    message: str
    param: str | None
    """The field that was refused, if it is the caller's mistake."""
    cached_tokens: int
    preemptions: int
    preemption_loss_ns: int


class LogprobColumns(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Log-probabilities of the tokens of some rows of a StepReport, packed as in `schemas.logprobs`."""

    rows: list[int]
    tops: list[int]
    values: bytes
    top_tokens: bytes


class StepReport(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="step"):
    """What one step gave, in columns, one row a request; `tokens` are all rows' packed ids, one after another."""

    iteration: int
    tickets: list[int]
    starts: list[int]
    counts: list[int]
    tokens: bytes
    finishes: list[FinishRow]
    logprobs: LogprobColumns | None
    load: LoadSnapshot
    prefill_starts_ns: dict[int, int] = {}
    """Of the rows with a request's first tokens: when its prefill began, on the host's monotonic clock."""


class IntegrityReport(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="integrity"):
    """A rank's answer to CheckIntegrity. Equal iteration and fingerprint on all ranks: equal slot decisions."""

    rank: int
    nonce: int
    iteration: int
    fingerprint: int
    problems: list[str]


class KvUnits(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A rank's units; see `schemas.memory.MemoryUnits`. The last group is this rank's last."""

    layers_per_group: int
    groups: int
    last_group_layers: int
    page_tokens: int
    unit_bytes: int
    unit_waste_bytes: int
    last_unit_waste_bytes: int
    units: int
    committed: int
    waste_bytes: int


class KvMemory(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="memory"):
    """A rank's answer to AskMemory."""

    rank: int
    nonce: int
    iteration: int
    resident_bytes: int
    units: KvUnits | None


class KvResized(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="resized"):
    """A rank's answer to ResizeKv. Equal on all ranks but for bytes and duration."""

    rank: int
    nonce: int
    iteration: int
    capacity: int
    """Now, in tokens."""
    request_tokens_max: int
    """Prompt plus output of one request, from now on."""
    evicted: int
    """Tokens of cached prefixes that had to go."""
    preempted: int
    """Requests that lost their memory and wait again."""
    released_bytes: int
    resident_bytes: int
    reason: str
    """Why the capacity isn't what was asked for; empty if it is."""
    duration_ns: int
    units: KvUnits | None = None


Answer = IntegrityReport | KvResized | KvMemory | moves.Answer | wire_layers.LayerAnswer
"""What a rank says to a question, by its nonce."""

Report = RankPhase | RankReady | LoadSnapshot | StepReport | moves.Applied | wire_layers.LayersExpired | Answer

_encoder = msgspec.msgpack.Encoder()
_report_decoder = msgspec.msgpack.Decoder(Report)


def encode(message: Command | Report) -> bytes:
    """The wire form of a message."""
    return _encoder.encode(message)


def decode_report(data: bytes) -> Report:
    """A report from its wire form. Raises msgspec.MsgspecError."""
    return _report_decoder.decode(data)


# ---- request ids inside SGLang ----

_RID = re.compile(r"(\d+):(.*)/(\d+)\.(\d+);", re.DOTALL)


def encode_rid(key: RequestKey) -> str:
    """The id under which SGLang knows a submission.

    No id is a prefix of another one (the length comes first and `;` ends it): SGLang aborts by prefix.
    """
    return f"{len(key.request_id)}:{key.request_id}/{key.attempt}.{key.hop};"


def decode_rid(rid: str) -> RequestKey:
    """The key in an id made by `encode_rid`. Raises ValueError on any other."""
    match = _RID.fullmatch(rid)
    if match is None or int(match[1]) != len(match[2]):
        raise ValueError(f"not a request id of ours: {rid!r}")
    return RequestKey(match[2], int(match[3]), int(match[4]))
