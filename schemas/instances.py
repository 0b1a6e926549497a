"""Messages about instances: load, dispatch, life and death."""

from enum import StrEnum
from typing import Literal, NamedTuple

from pydantic import Field

from meshift.schemas.base import Message, Part
from meshift.schemas.identity import FrontendRef, Owner
from meshift.schemas.requests import Priority


class InstanceState(StrEnum):
    """An instance's life."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    STOPPED = "stopped"


class ModelInfo(Part):
    """What an instance serves."""

    name: str
    """The id in `/v1/models`."""
    path: str = ""
    """Folder with tokenizer and chat template, as the worker sees it."""
    context_tokens_max: int
    vocabulary_size: int
    layers: int


class ClassLoad(Part):
    """Running requests of one priority class on one instance. Tokens unless said."""

    name: str
    execution: int
    """The least execution priority of the class."""
    running: int
    """Requests."""
    used: int
    headroom: int = 0
    """What the instance keeps free for the class while some of it runs; shared by those."""


class LoadReport(Message):
    """Worker -> all, every report interval. Tokens unless said. used + cached + free + reserved = capacity."""

    kind: Literal["load_report"] = "load_report"
    owner: Owner
    sequence: int
    emitted_ns: int
    state: InstanceState
    model: ModelInfo
    capacity: int
    used: int
    cached: int
    free: int
    reserved: int
    running: int
    """Requests in the batch, those in prefill included."""
    waiting: int
    head_demand: int
    """What the first waiting request needs to start."""
    queued_demand: int
    """What all waiting requests need to start."""
    headroom: int = 0
    """Virtual usage beyond the physical one, for priorities: that of `classes` together."""
    classes: tuple[ClassLoad, ...] = ()
    """The priority classes that run here, the most protected first; empty if the worker tells none apart."""
    layout_epoch: int = 0
    """One more with every change of its layout."""
    layers: tuple[int, ...] = ()
    """Of each pipeline stage; empty of an engine that doesn't tell."""
    layout_change: str = ""
    """The change of its layout that is under way."""
    step_count: int = 0
    prefill_tokens: int = 0
    """Whose KV prefill steps have computed since the engine's start."""
    batch_full: bool = False
    """The engine admits nothing to its batch now, whatever is free: it keeps room for what runs to grow."""


class InstanceGone(Message):
    """This incarnation serves no more; what it held must go on elsewhere."""

    kind: Literal["instance_gone"] = "instance_gone"
    owner: Owner
    reason: str


class PolicyStamp(NamedTuple):
    """When operators last changed the policy; the greater is the newer. Zeros: never."""

    incarnation: int = 0
    """Of the scheduler that was told."""
    version: int = 0
    """Counts what it was told."""


class SchedulerReport(Message):
    """Scheduler -> frontends: it lives."""

    kind: Literal["scheduler_report"] = "scheduler_report"
    scheduler_id: str
    incarnation: int
    instances: int
    policy: PolicyStamp = PolicyStamp()
    """Of its policy: frontends that know a newer one give it."""


class DispatchRequest(Message):
    """Frontend -> scheduler: where should this go?"""

    kind: Literal["dispatch_request"] = "dispatch_request"
    request_id: str
    attempt: int
    frontend: FrontendRef
    model: str
    demand: int = Field(ge=1)
    """Tokens that its prefill needs: prompt plus outputs so far."""
    priority: Priority = Priority()
    excluded: tuple[Owner, ...] = ()
    """Owners that just failed or refused it."""
    may_wait: bool = False
    """Whether the frontend understands a reply without an owner."""
    waited_s: float = Field(default=0.0, ge=0.0)
    """How long it has waited for room already: its place among those that wait."""


class DispatchReply(Message):
    """Scheduler -> frontend."""

    kind: Literal["dispatch_reply"] = "dispatch_reply"
    owner: Owner | None
    """None, to one that may wait: there is room nowhere yet; ask again."""
    scheduler_id: str
    incarnation: int
    reason: str = ""
    """Why this one, for traces."""
    ask_again_s: float = Field(default=0.0, ge=0.0)
    """With no owner: after this time."""


class MovePair(Message):
    """Scheduler -> source: give requests to `destination` until your freeness is `until_freeness` again, or the pair's
    time is over. A worker obeys the newest incarnation of a scheduler, and its newest pair only."""

    kind: Literal["move_pair"] = "move_pair"
    scheduler_id: str
    incarnation: int
    """The scheduler's."""
    source: Owner
    destination: Owner
    tokens_max: int = Field(ge=0)
    """What the destination has free: nothing larger is to be sent."""
    until_freeness: float = Field(allow_inf_nan=False)
    """Decode steps."""
    ttl_s: float = Field(gt=0.0, le=60.0, allow_inf_nan=False)
    headroom_max: int | None = Field(default=None, ge=0)
    """How much of the source's headroom counts, in tokens; None: all of it."""
    waiting: bool = False
    """Give the request that waits at the head of the queue, which has no KV to copy, and no running one."""
    reason: str = ""


class DrainRequest(Message):
    """Stop taking requests; leave when the running ones have ended or `deadline_s` is over."""

    kind: Literal["drain_request"] = "drain_request"
    deadline_s: float = Field(default=30.0, ge=0.0)
    restart: bool = False
    """It is to be started again by whoever started it (`meshift up`, a container's restart policy)."""


class DrainReply(Message):
    """The drain has begun."""

    kind: Literal["drain_reply"] = "drain_reply"
    owner: Owner
    requests_left: int


class StatusRequest(Message):
    """Operator -> worker."""

    kind: Literal["status_request"] = "status_request"


class DrainStatus(Part):
    """Where a drain is."""

    left: int
    """Requests that run here still."""
    moving: int
    moved: int
    """Since the drain began."""
    deadline_s: float
    """Until it leaves whatever is left; negative when that is past."""
    blocked: str = ""
    """Why what is left doesn't move away, if it doesn't: then it is waited for."""


class WorkerStatus(Message):
    """Worker -> operator."""

    kind: Literal["worker_status"] = "worker_status"
    load: LoadReport
    engine: str
    ranks: tuple[int, ...]
    """Process ids of the instance's ranks; empty for a simulated engine."""
    requests: int
    unacknowledged: int
    drain: DrainStatus | None = None
    """None unless it drains."""
    moves_out: int = 0
    """Requests that are moving away from it."""
    moves_in: int = 0
    """Requests that are moving to it."""
