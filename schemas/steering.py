"""Messages by which operators steer the scheduler's policy and see what it decides."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

from pydantic import Field, JsonValue

from meshift.schemas.base import Message, Part
from meshift.schemas.instances import PolicyStamp
from meshift.schemas.limits import DECISIONS_LISTED_MAX
from meshift.schemas.moves import MoveReport
from meshift.schemas.requests import RequestId

Changes = Mapping[str, JsonValue]
"""Settings by section, as in `{"migration": {"out_below": 5}}`."""


class KeptPolicy(Message):
    """Frontend -> scheduler: what operators have changed, for one that has started since. It takes what is newer than
    its own."""

    kind: Literal["kept_policy"] = "kept_policy"
    stamp: PolicyStamp
    changes: dict[str, JsonValue]
    """From the settings that the scheduler was started with."""


class PolicyRequest(Message):
    """Frontend -> scheduler: change these settings, if any, and tell all."""

    kind: Literal["policy_request"] = "policy_request"
    changes: dict[str, JsonValue] = Field(default_factory=dict)
    kept: KeptPolicy | None = None
    """Taken before the changes, if the scheduler has none as new."""


class PolicyReply(Message):
    """Scheduler -> frontend: the settings that are in force."""

    kind: Literal["policy_reply"] = "policy_reply"
    scheduler_id: str
    incarnation: int
    stamp: PolicyStamp
    """When operators last changed them; zeros if they haven't."""
    settings: dict[str, JsonValue]
    """All of them, by section."""
    changes: dict[str, JsonValue]
    """Those that operators changed and the scheduler wasn't started with."""


class DecisionSubject(StrEnum):
    """What was decided."""

    DISPATCH = "dispatch"
    """Where a request goes."""
    PAIR = "pair"
    """Which instance gives requests to which."""
    HEADROOM = "headroom"
    """How much of what priority classes ask for is kept free."""
    SCALING = "scaling"
    """How many instances there are."""


class DecisionAlternative(Part):
    """What could have been chosen."""

    name: str
    figures: dict[str, float | None]
    """That decided. None: not finite; the freeness of an instance that drains."""
    rejected: str
    """Why it wasn't; empty for the one that was."""


class Decision(Part):
    """One decision, with what it was made from."""

    sequence: int
    """Counts the scheduler's decisions."""
    age_s: float
    subject: DecisionSubject
    model: str
    request_id: str = ""
    attempt: int = 0
    decision: str
    why: str
    inputs: dict[str, JsonValue]
    alternatives: tuple[DecisionAlternative, ...]
    """Those that were chosen first."""
    alternatives_left_out: int = 0


class DecisionsRequest(Message):
    """Frontend -> scheduler: what did you decide?"""

    kind: Literal["decisions_request"] = "decisions_request"
    subject: DecisionSubject | None = None
    """Only these."""
    request_id: RequestId | None = None
    """Only those about it."""
    limit: int = Field(default=50, ge=1, le=DECISIONS_LISTED_MAX)


class DecisionsReply(Message):
    """Scheduler -> frontend."""

    kind: Literal["decisions_reply"] = "decisions_reply"
    scheduler_id: str
    incarnation: int
    decisions: tuple[Decision, ...]
    """The newest first, of those that are remembered."""
    decided: int
    """Since the scheduler's start."""
    remembered: int
    current: tuple[Decision, ...] = ()
    """The newest looks at pairs and at scaling, which mostly come to nothing: why nothing is done now."""


class RequestExplanation(Part):
    """Where a request was sent and moved, and why, as far as the mesh remembers."""

    request_id: str
    owner: str = ""
    """Who has it now; empty if no frontend that was asked has it open."""
    dispatches: tuple[Decision, ...] = ()
    """Oldest first: an attempt each, and waits for room."""
    moves: tuple[MoveReport, ...] = ()
    pairs: tuple[Decision, ...] = ()
    """Those that named the moves' instances."""
    unanswered: tuple[str, ...] = ()
    """Services that were asked and didn't answer: what they know is missing."""
