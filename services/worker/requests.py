"""The requests of one instance: what they gave so far, until their frontend has acknowledged the finish.

Pure: `now_s` comes in. Core NATS delivers at most once, so whatever was sent must be there to be sent again.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from meshift.schemas.base import count_tokens
from meshift.schemas.errors import InvalidRequest, Stale
from meshift.schemas.identity import FrontendRef, Owner, RequestKey
from meshift.schemas.limits import LOGPROB_MESSAGE_BYTES_MAX
from meshift.schemas.logprobs import Logprobs
from meshift.schemas.requests import Finish, Priority, Sampling, Submit
from meshift.services.worker.traces import RequestTrace

TOMBSTONES_MAX = 100_000
"""Closed requests remembered at most; the oldest go first."""


@dataclass(slots=True)
class RequestRecord:
    """One request that runs here, or ended here and isn't acknowledged."""

    key: RequestKey
    frontend: FrontendRef
    prompt: bytes
    """Packed."""
    sampling: Sampling
    priority: Priority
    base: int
    """Index of the first token generated in this attempt: those before came with the submission."""
    output: "array[int]" = field(default_factory=lambda: array("i"))
    finish: Finish | None = None
    sent_s: float = 0.0
    """When the finish was last sent."""
    logprobs: Logprobs | None = None
    """Of `output`, one each, if the request asked for them."""
    muted: bool = False
    """Superseded or cancelled by its frontend's fence: runs out, and nothing of it is sent."""
    trace: RequestTrace | None = None
    """None if nobody records it."""
    came_from: Owner | None = None
    """The instance that it moved here from, to be told when it is over."""
    came_s: float | None = None
    """When it moved here."""
    moving: bool = False
    """A move away is under way."""
    fencing: bool = False
    """Its frontend may have raised its attempt; whether it has, isn't known here yet."""
    tried: set[Owner] = field(default_factory=set)
    """Destinations whose engines refuse the next hop of this attempt, since a move there was given up."""

    @property
    def over(self) -> bool:
        """It has ended, or is to end: nothing more is to be done for it."""
        return self.muted or self.finish is not None

    @property
    def prompt_tokens(self) -> int:
        """Length of its prompt."""
        return count_tokens(self.prompt)

    @property
    def known_tokens(self) -> int:
        """Prompt and output so far, of all attempts."""
        return self.prompt_tokens + self.end

    @property
    def end(self) -> int:
        """Index after the newest token."""
        return self.base + len(self.output)

    def tokens_from(self, start: int) -> "array[int]":
        """Tokens [start, end). Raises InvalidRequest if they aren't kept here."""
        if not self.base <= start <= self.end:
            raise InvalidRequest(f"{self.key} has tokens {self.base} to {self.end}, not {start}", param="start")
        return self.output[start - self.base :]

    def replay_from(self, start: int) -> "tuple[array[int], Logprobs | None, Finish | None]":
        """Tokens from `start` on, their log-probabilities and the finish: without it, only as many of the first tokens
        as a message takes, if they are too many with their log-probabilities. Raises InvalidRequest."""
        tokens, finish = self.tokens_from(start), self.finish
        if self.logprobs is None:
            return tokens, None, finish
        count_max = max(1, LOGPROB_MESSAGE_BYTES_MAX // Logprobs.token_bytes(self.logprobs.top))
        if len(tokens) > count_max:
            tokens, finish = tokens[:count_max], None
        first = start - self.base
        return tokens, self.logprobs[first : first + len(tokens)], finish


class RequestTable:
    """Records by request id (one record a request: a newer attempt takes the place of an older one)."""

    def __init__(self, tombstone_s: float) -> None:
        self._tombstone_s = tombstone_s
        self._records: dict[str, RequestRecord] = {}
        self._muted: dict[RequestKey, RequestRecord] = {}
        """Superseded ones that the engine hasn't let go of."""
        self._former: dict[RequestKey, RequestRecord] = {}
        """By the keys under which the engine may still give events, while it learns the new ones."""
        self._closed: dict[str, tuple[int, int, float]] = {}
        """The newest (attempt, hop) closed here, and until when that is remembered."""

    def __iter__(self) -> Iterator[RequestRecord]:
        return iter(self._records.values())

    def __len__(self) -> int:
        return len(self._records)

    def running(self) -> int:
        """Requests that the engine has."""
        return len(self._muted) + sum(record.finish is None for record in self._records.values())

    def get(self, key: RequestKey) -> RequestRecord | None:
        """The record of exactly that key."""
        record = self._records.get(key.request_id)
        if record is not None and record.key == key:
            return record
        return self._muted.get(key) or self._former.get(key)

    def find(self, request_id: str) -> RequestRecord | None:
        """The request's record, whatever its attempt and hop."""
        return self._records.get(request_id)

    def check_new(self, key: RequestKey) -> bool:
        """Whether that submission, or arrival, is new (False: a repetition of one that is here). Raises Stale if it is
        superseded."""
        record = self._records.get(key.request_id)
        if record is not None and record.key == key:
            return False
        known = record.key[1:] if record is not None else (0, 0)
        closed = self._closed.get(key.request_id)
        if key[1:] <= max(known, closed[:2] if closed else (0, 0)):
            raise Stale(f"{key} is superseded or was closed here")
        return True

    def add(self, submit: Submit, base: int, trace: RequestTrace | None = None) -> RequestRecord | None:
        """Take a new submission in. Returns the older attempt's record that the engine must cancel, if any."""
        record = RequestRecord(
            submit.key, submit.frontend, submit.prompt, submit.sampling, submit.priority, base, trace=trace
        )
        if submit.sampling.logprobs is not None:
            record.logprobs = Logprobs(submit.sampling.logprobs)
        return self.enter(record)

    def enter(self, record: RequestRecord) -> RequestRecord | None:
        """Take a new record in. Returns the older attempt's that the engine must cancel, if any."""
        older = self._records.pop(record.key.request_id, None)
        self._records[record.key.request_id] = record
        if older is None or older.finish is not None:
            return None
        older.muted = True
        self._muted[older.key] = older
        return older

    def rekey(self, record: RequestRecord, attempt: int) -> None:
        """Its frontend raised its attempt. Until `forget_former`, the engine's events may bear the old key too."""
        self._former[record.key] = record
        record.key = record.key._replace(attempt=attempt)

    def forget_former(self, key: RequestKey) -> None:
        """The engine uses the new key only."""
        self._former.pop(key, None)

    def leave(self, record: RequestRecord, now_s: float) -> None:
        """It moved away: neither it nor its key come back, but by another move."""
        self._bury(record.key, now_s)
        self.discard(record.key)

    def discard(self, key: RequestKey) -> None:
        """Take back one that the engine refused."""
        record = self._records.get(key.request_id)
        if record is not None and record.key == key:
            del self._records[key.request_id]

    def close(self, key: RequestKey, now_s: float) -> RequestRecord | None:
        """The frontend is through with every attempt up to `key`: remember it, and return the record that the
        engine must cancel, if it runs here."""
        self._bury(key, now_s)
        record = self._records.get(key.request_id)
        if record is None or record.key[1:] > key[1:]:
            return None
        del self._records[key.request_id]
        if record.finish is not None:
            return None
        record.muted = True
        self._muted[record.key] = record
        return record

    def engine_ended(self, record: RequestRecord) -> None:
        """The engine let go of a muted record."""
        self._muted.pop(record.key, None)

    def abandon_traces(self, reason: str) -> None:
        """The instance serves no more: end the spans that are open."""
        for record in (*self._records.values(), *self._muted.values()):
            if record.trace is not None:
                record.trace.abandon(reason)

    def unacknowledged(self) -> list[RequestRecord]:
        """Records whose finish hasn't been acknowledged."""
        return [record for record in self._records.values() if record.finish is not None]

    def forget_tombstones(self, now_s: float) -> None:
        """Drop those whose time is over. They were buried in order of time, so it stops at the first young one."""
        while self._closed:
            oldest = next(iter(self._closed))
            if self._closed[oldest][2] > now_s:
                return
            del self._closed[oldest]

    def _bury(self, key: RequestKey, now_s: float) -> None:
        closed = self._closed.pop(key.request_id, (0, 0, 0.0))
        place = max(closed[:2], key[1:])
        self._closed[key.request_id] = (*place, now_s + self._tombstone_s)
        if len(self._closed) > TOMBSTONES_MAX:
            del self._closed[next(iter(self._closed))]
