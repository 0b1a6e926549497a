"""One request as its frontend sees it. Pure: `now_s` comes in; the core does the talking.

Exactly once: tokens are taken in order of their index, from the current (attempt, hop, owner) only. What comes
early waits in a small reorder buffer; what is missing is asked for; what is old is answered with a cancel.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto

from meshift.schemas.admin import OpenRequest
from meshift.schemas.errors import InternalError, InvalidRequest, MeshError
from meshift.schemas.identity import FrontendRef, Owner, RequestKey
from meshift.schemas.logprobs import Logprobs
from meshift.schemas.moves import Fence, FenceVerdict
from meshift.schemas.requests import Finish, FinishReason
from meshift.services.frontend.api import GenerateRequest
from meshift.services.frontend.traces import NO_TRACE, StreamTrace

REORDER_ROWS_MAX = 64
"""Early rows kept for a stream; beyond that they are dropped and asked for again."""


class StreamState(StrEnum):
    """The life of a request at its frontend."""

    SUBMITTING = "submitting"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class StreamEvent(StrEnum):
    """What happens to it."""

    ACCEPTED = "accepted"
    OWNER_LOST = "owner_lost"
    FINISH = "finish"
    FAIL = "fail"
    CANCEL = "cancel"


_S, _E = StreamState, StreamEvent

TRANSITIONS: dict[tuple[StreamState, StreamEvent], StreamState] = {
    (_S.SUBMITTING, _E.ACCEPTED): _S.RUNNING,
    # Tokens, and even the finish, may overtake the answer to the submission.
    (_S.SUBMITTING, _E.FINISH): _S.FINISHED,
    (_S.SUBMITTING, _E.FAIL): _S.FAILED,
    (_S.SUBMITTING, _E.CANCEL): _S.CANCELLED,
    (_S.RUNNING, _E.OWNER_LOST): _S.SUBMITTING,
    (_S.RUNNING, _E.FINISH): _S.FINISHED,
    (_S.RUNNING, _E.FAIL): _S.FAILED,
    (_S.RUNNING, _E.CANCEL): _S.CANCELLED,
}


class Verdict(Enum):
    """What an event's identity says."""

    CURRENT = auto()
    NEWER_HOP = auto()
    """The request moved: its new owner speaks for the first time."""
    FORMER = auto()
    """Its former owner's tokens, which come late: they count up to where the new owner began."""
    STALE = auto()


@dataclass(slots=True)
class Former:
    """The owner that a request moved away from."""

    hop: int
    owner: Owner
    end: int
    """Index after its last token."""
    asked: bool = False
    """It was asked for what is missing: now the new owner is."""


class Stream:
    """State of one request. `output` only grows."""

    def __init__(self, request: GenerateRequest, begin_s: float = 0.0) -> None:
        self.request = request
        self.begin_s = begin_s
        self.first_s: float | None = None
        """When its first token came."""
        self.grown_s = begin_s
        """When its newest token came."""
        self.timed = 0
        """Tokens whose times are counted."""
        self.trace: StreamTrace = NO_TRACE
        self.state = StreamState.SUBMITTING
        self.attempt = 0
        self.hop = 0
        self.owner: Owner | None = None
        self.output: array[int] = array("i")
        top = request.sampling.logprobs
        self.logprobs: Logprobs | None = None if top is None else Logprobs(top)
        """Of `output`, one each, if the request asked for them."""
        self.finish: Finish | None = None
        self.error: MeshError | None = None
        self.heard_s = 0.0
        """When the current owner last said anything of it."""
        self.heard_owner = False
        """Whether the current owner said anything since the submission."""
        self.asking = False
        """A question for missing tokens is on its way."""
        self.asks_failed = 0
        self.given_up = False
        """Its owner is lost, and no other has been tried yet."""
        self.former: Former | None = None
        self._raised: RequestKey | None = None
        """The key whose attempt a fence raised to the present one."""
        self._early: dict[int, tuple[Sequence[int], Finish | None, Logprobs | None]] = {}

    @property
    def key(self) -> RequestKey:
        """The identity that events must carry now."""
        return RequestKey(self.request.request_id, self.attempt, self.hop)

    @property
    def ended(self) -> bool:
        return self.state not in (StreamState.SUBMITTING, StreamState.RUNNING)

    @property
    def output_tokens(self) -> int:
        """Length of its output."""
        return len(self.output)

    @property
    def has_gap(self) -> bool:
        return bool(self._early)

    def describe(self, frontend: FrontendRef) -> OpenRequest:
        """What operators see of it, while it is open at that frontend."""
        return OpenRequest(
            request_id=self.request.request_id,
            frontend=frontend,
            model=self.request.model,
            state="running" if self.state is StreamState.RUNNING else "submitting",
            attempt=self.attempt,
            hop=self.hop,
            owner=self.owner,
            prompt_tokens=len(self.request.prompt),
            output_tokens=len(self.output),
            priority=self.request.priority,
        )

    def enter(self, event: StreamEvent) -> None:
        """Take a transition of the table. Raises InternalError for one it doesn't have."""
        try:
            self.state = TRANSITIONS[self.state, event]
        except KeyError:
            raise InternalError(f"a stream that is {self.state} can't take {event}") from None
        self.given_up = event is StreamEvent.OWNER_LOST

    def begin_attempt(self, owner: Owner, now_s: float) -> RequestKey:
        """A new submission, to `owner`: everything of the attempts before is stale from now on."""
        self.attempt += 1
        self.hop = 0
        self._change_owner(owner, now_s)
        return self.key

    def adopt(self, hop: int, owner: Owner, start: int, now_s: float) -> None:
        """The request moved to `owner`, which goes on at index `start`."""
        assert self.owner is not None, "moved from an owner"
        former = Former(self.hop, self.owner, start)
        self.hop = hop
        self._change_owner(owner, now_s)
        self.former = former
        if self.state is StreamState.SUBMITTING:
            # Before the answer to its submission has come, or when its former owner was taken for lost.
            self.enter(StreamEvent.ACCEPTED)

    def fence(self, fence: Fence, now_s: float) -> FenceVerdict:
        """Who owns it: the source of a move that lost its destination asks. Where that has not been heard of, the
        source gets a new attempt, and it never will be."""
        place = (fence.attempt, fence.hop)
        if self.ended or self.given_up or self.owner is None:
            return FenceVerdict.GONE
        if self._raised == fence.destination_key and (self.hop, self.owner) == (fence.hop - 1, fence.source):
            return FenceVerdict.RAISED if self.attempt == fence.attempt + 1 else FenceVerdict.GONE
        if (self.attempt, self.hop) > place and self.attempt == fence.attempt:
            return FenceVerdict.MOVED
        if (self.attempt, self.hop) == place:
            return FenceVerdict.MOVED if self.owner == fence.destination else FenceVerdict.GONE
        if (self.attempt, self.hop + 1) != place or self.owner != fence.source:
            return FenceVerdict.GONE
        self._raise_attempt(fence, now_s)
        return FenceVerdict.RAISED

    def _raise_attempt(self, fence: Fence, now_s: float) -> None:
        self.attempt += 1
        self._change_owner(fence.source, now_s)
        self._raised = fence.destination_key
        if self.state is StreamState.SUBMITTING:
            self.enter(StreamEvent.ACCEPTED)

    def _change_owner(self, owner: Owner, now_s: float) -> None:
        self.owner = owner
        self.heard_s = now_s
        self.heard_owner = False
        self.asks_failed = 0
        self.given_up = False
        self.former = None
        self._raised = None
        self._early.clear()

    def judge(self, attempt: int, hop: int, owner: Owner) -> Verdict:
        """Whether an event of this identity counts."""
        if attempt != self.attempt or self.owner is None:
            return Verdict.STALE
        if hop < self.hop:
            former = self.former
            is_former = former is not None and (hop, owner) == (former.hop, former.owner)
            return Verdict.FORMER if is_former else Verdict.STALE
        if hop > self.hop:
            return Verdict.NEWER_HOP
        return Verdict.CURRENT if owner == self.owner else Verdict.STALE

    def take(
        self,
        start: int,
        tokens: Sequence[int],
        finish: Finish | None,
        now_s: float,
        logprobs: Logprobs | None = None,
    ) -> bool:
        """Tokens [start, start + len(tokens)) from the current owner, with one log-probability each if it was asked
        for them. Returns whether anything new can be read."""
        self.heard_s = now_s
        self.heard_owner = True
        self.asks_failed = 0
        if start > len(self.output):
            if len(self._early) < REORDER_ROWS_MAX:
                self._early[start] = (tokens, finish, logprobs)
            return False
        grown = self._append(start, tokens, finish, logprobs)
        return self._take_early() or grown

    def _take_early(self) -> bool:
        grown = False
        while self._early and not self.ended:
            early = min(self._early)
            if early > len(self.output):
                break
            grown = self._append(early, *self._early.pop(early)) or grown
        return grown

    def take_former(self, start: int, tokens: Sequence[int], logprobs: Logprobs | None = None) -> bool:
        """The same from the former owner, of what it gave before the request moved."""
        assert self.former is not None, "judged so"
        count = max(0, min(len(tokens), self.former.end - start))
        if start > len(self.output) or not count:
            return False
        grown = self._append(start, tokens[:count], None, None if logprobs is None else logprobs[:count])
        return self._take_early() or grown

    def whom_to_ask(self) -> tuple[RequestKey, Owner]:
        """For what is missing: the former owner once, if it gave that; else the owner."""
        former = self.former
        assert self.owner is not None, "running"
        if former is None or former.asked or len(self.output) >= former.end:
            return self.key, self.owner
        return self.key._replace(hop=former.hop), former.owner

    def _append(self, start: int, tokens: Sequence[int], finish: Finish | None, logprobs: Logprobs | None) -> bool:
        known = len(self.output) - start
        if known > len(tokens):
            return False
        if self.logprobs is not None and known < len(tokens):
            if logprobs is None or len(logprobs) != len(tokens) or logprobs.top != self.logprobs.top:
                self.fail(InternalError(f"{self.owner} gave tokens without their log-probabilities"))
                return True
            self.logprobs.extend(logprobs[known:])
        self.output.extend(tokens[known:])
        if finish is not None:
            self._end(finish)
        return finish is not None or known < len(tokens)

    def _end(self, finish: Finish) -> None:
        if finish.reason is FinishReason.ERROR and finish.param is not None:
            self.fail(InvalidRequest(finish.message, param=finish.param))
            return
        if finish.reason is FinishReason.ERROR:
            self.fail(InternalError(f"the engine failed this request: {finish.message}"))
            return
        self.finish = finish
        self.enter(StreamEvent.FINISH)

    def fail(self, error: MeshError) -> None:
        """It can't go on."""
        self.error = error
        self.enter(StreamEvent.FAIL)
