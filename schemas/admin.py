"""What the admin routes of a frontend say and take, and what frontends ask each other for it."""

from typing import Annotated, Literal

from pydantic import Field

from meshift.schemas.base import Message, Part
from meshift.schemas.identity import FrontendRef, Owner
from meshift.schemas.instances import DrainStatus, LoadReport
from meshift.schemas.limits import REQUESTS_LISTED_MAX
from meshift.schemas.moves import MoveMode, MovesReply
from meshift.schemas.requests import Priority, RequestId

InstanceName = Annotated[str, Field(min_length=1, max_length=64)]


class OpenRequest(Part):
    """A request that hasn't ended, as its frontend sees it. Each of several answers to one call is a request."""

    request_id: str
    frontend: FrontendRef
    model: str
    state: Literal["submitting", "running"]
    """Submitting: no owner has it now; it is new, or lost its owner."""
    attempt: int
    hop: int
    owner: Owner | None
    prompt_tokens: int
    output_tokens: int
    """So far."""
    priority: Priority


class RequestsRequest(Message):
    """Frontend -> frontend: which requests are open?"""

    kind: Literal["requests_request"] = "requests_request"
    request_id: RequestId | None = None
    """Only that one."""


class RequestsReply(Message):
    """Frontend -> frontend."""

    kind: Literal["requests_reply"] = "requests_reply"
    requests: tuple[OpenRequest, ...] = Field(max_length=REQUESTS_LISTED_MAX)
    """Oldest first."""
    total: int = Field(ge=0)
    """There may be more than are listed."""


class RequestList(Part):
    """Open requests of all frontends: for each of them, oldest first."""

    object: Literal["list"] = "list"
    data: tuple[OpenRequest, ...]
    total: int
    """There may be more than are listed."""
    unanswered: tuple[str, ...] = ()
    """Frontends that live and didn't answer: theirs are missing."""


class InstanceStatus(Part):
    """A live instance: its newest report, and what it says when it is asked."""

    load: LoadReport
    answers: bool
    """False: it didn't answer in time, and what follows isn't known."""
    engine: str = ""
    ranks: tuple[int, ...] = ()
    """Process ids of its ranks; empty for a simulated engine."""
    requests: int = 0
    """That run there, or wait there."""
    unacknowledged: int = 0
    """Finishes that no frontend has acknowledged yet."""
    moves_out: int = 0
    moves_in: int = 0
    drain: DrainStatus | None = None
    """How far its drain is, if it drains."""


class InstanceList(Part):
    """The live instances, by name."""

    object: Literal["list"] = "list"
    data: tuple[InstanceStatus, ...]


class MoveList(Part):
    """Moves of the live instances, by name: those under way, and the newest that have ended."""

    object: Literal["list"] = "list"
    data: tuple[MovesReply, ...]
    unanswered: tuple[str, ...] = ()
    """Instances that live and didn't answer."""


class DrainBody(Part):
    """How to drain an instance: it takes no more requests, moves away those that it has, and leaves."""

    deadline_s: Annotated[float, Field(ge=0.0, le=86_400.0, allow_inf_nan=False)] | None = 30.0
    """Then it leaves, whatever is left; that is computed anew elsewhere. None: it waits for as long as it takes. A
    later call may only shorten it."""
    force: bool = False
    """It leaves now."""
    restart: bool = False
    """Whoever started it starts it again: `meshift up`, or a container's restart policy."""


class MoveBody(Part):
    """How to move a request."""

    destination: InstanceName | None = None
    """An instance's name; None: wherever there is room."""
    mode: MoveMode = MoveMode.LIVE
    deadline_s: float = Field(default=30.0, gt=0.0, le=3_600.0, allow_inf_nan=False)
    """If it hasn't come about by then, the request stays."""
    wait: bool = False
    """Answer when the move has ended, with its figures; else when it has begun."""
