"""Messages about one request: submission, its tokens, its end."""

from enum import StrEnum
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, model_validator

from meshift.schemas.base import Message, PackedTokens, Part, count_tokens
from meshift.schemas.identity import FrontendRef, Owner, RequestKey
from meshift.schemas.limits import (
    JSON_SCHEMA_CHARS_MAX,
    LOGIT_BIAS_MAX,
    LOGPROBS_TOP_MAX,
    REQUEST_ID_CHARS_MAX,
    STOP_STRING_CHARS_MAX,
    STOP_STRINGS_MAX,
)

TokenBias = tuple[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=-100.0, le=100.0)]]
"""A token id, and what is added to its logit before a token is chosen."""

RequestId = Annotated[str, Field(min_length=1, max_length=REQUEST_ID_CHARS_MAX)]


class Sampling(Part):
    """How tokens are chosen and when a request ends; SGLang's names and meanings."""

    max_new_tokens: int = Field(ge=1)
    min_new_tokens: int = Field(default=0, ge=0)
    temperature: float = Field(default=1.0, ge=0.0, le=2.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=-1, ge=-1)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    repetition_penalty: float = Field(default=1.0, gt=0.0, le=2.0)
    stop: tuple[Annotated[str, Field(min_length=1, max_length=STOP_STRING_CHARS_MAX)], ...] = Field(
        default=(), max_length=STOP_STRINGS_MAX
    )
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[TokenBias, ...] = Field(default=(), max_length=LOGIT_BIAS_MAX)
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = Field(default=None, ge=0, le=LOGPROBS_TOP_MAX)
    """Give each token's log-probability, and those of so many likeliest tokens beside it; None gives none."""
    json_schema: str | None = Field(default=None, max_length=JSON_SCHEMA_CHARS_MAX)
    """A JSON schema, as text, that the output obeys."""


class TokenLogprob(NamedTuple):
    """Log-probability (natural) of a token that was generated, and of the likeliest ones at its place."""

    value: float
    top: tuple[tuple[int, float], ...] = ()
    """`(token id, log-probability)`, likeliest first."""


LOGPROB_BYTES = 8
"""Of one packed log-probability, a little-endian double."""


class LogprobColumns(Part):
    """Log-probabilities of some rows of a message, one row after another; rows whose request asked for none are left
    out. `meshift.schemas.logprobs` packs and unpacks it."""

    rows: tuple[int, ...]
    tops: tuple[Annotated[int, Field(ge=0, le=LOGPROBS_TOP_MAX)], ...]
    """Likeliest tokens at each place of the row."""
    counts: tuple[Annotated[int, Field(ge=0)], ...]
    """Tokens of the row."""
    values: bytes
    """Doubles: of each token itself, then of its likeliest ones."""
    top_tokens: PackedTokens
    """The likeliest ones' ids."""

    @model_validator(mode="after")
    def _whole(self) -> "LogprobColumns":
        if not len(self.rows) == len(self.tops) == len(self.counts):
            raise ValueError("columns of different lengths")
        tops = sum(count * top for count, top in zip(self.counts, self.tops, strict=True))
        if len(self.values) != LOGPROB_BYTES * (sum(self.counts) + tops) or count_tokens(self.top_tokens) != tops:
            raise ValueError(f"{len(self.values)} bytes of log-probabilities are not those of {self.counts} tokens")
        return self


class Priority(Part):
    """Place in the queue, and protection while running (Llumnix, section 4.3). Greater is more important."""

    scheduling: int = 0
    execution: int = 0


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class Finish(Part):
    """The end of a request on its owner."""

    reason: FinishReason
    matched_stop: str | int | None = None
    """The stop string or token id that ended it."""
    message: str = ""
    """For `error`: what went wrong."""
    param: str | None = None
    """For `error`: the field of the request that the engine refuses, if the caller can mend it."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    preemptions: int = 0
    preemption_loss_ns: int = 0
    """Time between preemptions and the ends of their recomputations."""


class Submit(Message):
    """Frontend -> worker. Idempotent by `(request_id, attempt)`."""

    kind: Literal["submit"] = "submit"
    request_id: RequestId
    attempt: int = Field(ge=1)
    hop: int = Field(default=0, ge=0)
    owner: Owner
    """Whom it is meant for; another incarnation refuses with `stale`."""
    frontend: FrontendRef
    prompt: PackedTokens
    output: PackedTokens = b""
    """Tokens that earlier attempts gave; generation goes on at index `len(output)`."""
    sampling: Sampling
    priority: Priority = Priority()

    @property
    def key(self) -> RequestKey:
        return RequestKey(self.request_id, self.attempt, self.hop)


class SubmitReply(Message):
    """The owner has it (or had it already)."""

    kind: Literal["submit_reply"] = "submit_reply"
    owner: Owner


class TokenFinish(Part):
    """The finish of the request in row `row` of a TokenBatch."""

    row: int
    finish: Finish


class TokenBatch(Message):
    """Worker -> frontend: what one engine step gave this frontend's requests. Columns, one row a request."""

    kind: Literal["token_batch"] = "token_batch"
    owner: Owner
    emitted_ns: int
    """The owner's monotonic clock; comparable within one owner (and, in simulation, everywhere)."""
    request_ids: tuple[str, ...]
    attempts: tuple[int, ...]
    hops: tuple[int, ...]
    starts: tuple[int, ...]
    """Index of the row's first token in its request's output."""
    counts: tuple[int, ...]
    tokens: PackedTokens
    """All rows' tokens, one row after another."""
    finishes: tuple[TokenFinish, ...] = ()
    logprobs: LogprobColumns | None = None
    """Of the rows with tokens whose request asked for them."""


class Cancel(Message):
    """Frontend -> worker: stop these and free their memory. Also the answer to stale events."""

    kind: Literal["cancel"] = "cancel"
    frontend: FrontendRef
    owner: Owner
    keys: tuple[RequestKey, ...]
    stale: bool = False
    """Only this owner's part is unwanted: where the requests moved they may go on. Else whoever has them now stops."""


class Acknowledge(Message):
    """Frontend -> worker: these finishes have arrived; their outputs need not be kept."""

    kind: Literal["acknowledge"] = "acknowledge"
    frontend: FrontendRef
    owner: Owner
    keys: tuple[RequestKey, ...]


class Lease(Message):
    """Frontend -> all workers: this incarnation lives; its requests may go on for `ttl_s`."""

    kind: Literal["lease"] = "lease"
    frontend: FrontendRef
    ttl_s: float


class ReplayRequest(Message):
    """Frontend -> owner: the tokens of `request_id` from `start` on, please."""

    kind: Literal["replay_request"] = "replay_request"
    request_id: RequestId
    attempt: int
    hop: int
    owner: Owner
    start: int = Field(ge=0)

    @property
    def key(self) -> RequestKey:
        return RequestKey(self.request_id, self.attempt, self.hop)


class ReplayState(StrEnum):
    """What the owner knows of a request."""

    RUNNING = "running"
    FINISHED = "finished"
    MOVED = "moved"
    """It ran here; `moved_to` has it now, as hop `hop`."""
    UNKNOWN = "unknown"


class ReplayReply(Message):
    """Owner -> frontend."""

    kind: Literal["replay_reply"] = "replay_reply"
    owner: Owner
    state: ReplayState
    start: int = 0
    tokens: PackedTokens = b""
    """From `start` on; perhaps not all of them, where log-probabilities make them many bytes: then without a finish."""
    logprobs: LogprobColumns | None = None
    """Of all `tokens`, as row 0, if the request asked for them."""
    finish: Finish | None = None
    moved_to: Owner | None = None
    hop: int = 0
