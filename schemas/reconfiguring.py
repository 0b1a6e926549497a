"""Messages about changing an instance's layout while it serves.

A change goes from one layout to another by its id. The coordinator drives it by orders to the instance's worker, each
of which may come twice; the worker keeps what is needed to go on, so that a coordinator may die at any time.
`docs/layer_moves.md` tells how they follow one another.
"""

from enum import StrEnum
from typing import Literal

from pydantic import Field

from meshift.schemas.base import Message, Part
from meshift.schemas.identity import Owner
from meshift.schemas.layouts import (
    CHANGES_LISTED_MAX,
    LAG_POINTS_MAX,
    STAGES_MAX,
    ChangeId,
    CommitMode,
    Count,
    LayoutFacts,
    LayoutFlags,
    LayoutPlan,
    LayoutRefusal,
    Reason,
    Split,
    StageProgress,
    StagesInProgress,
)

# ---- coordinator and worker


class LayoutStep(StrEnum):
    """What the coordinator orders, in this order."""

    BEGIN = "begin"
    RESIZE = "resize"
    """Room for both layouts' layers."""
    COPY = "copy"
    """Load weights and copy KV, in the background."""
    COMMIT = "commit"
    ABORT = "abort"


class WorkerPhase(StrEnum):
    """Where a change is at its worker; the table is `meshift.services.worker.layouts.table`."""

    BEGINNING = "beginning"
    BEGUN = "begun"
    RESIZING = "resizing"
    RESIZED = "resized"
    STARTING = "starting"
    """The engine is told to load and copy."""
    COPYING = "copying"
    CLOSING = "closing"
    """Requests that move here, or away, are waited for, or stopped from it."""
    COMMITTING = "committing"
    ASKING = "asking"
    """Whether COMMIT is in the log isn't known yet."""
    GROWING = "growing"
    """It is committed; capacity becomes what the new layout has room for."""
    COMMITTED = "committed"
    ABORTING = "aborting"
    RESTORING = "restoring"
    """It is undone; capacity becomes what it was."""
    ABORTED = "aborted"


class LayoutOrders(Part):
    """All that is needed to carry a change out: the worker keeps it for whoever goes on with it."""

    target: Split
    epoch: Count
    """Of the layout that it was planned for."""
    flags: LayoutFlags = LayoutFlags()
    commit: CommitMode = CommitMode.DRAIN
    capacity_during: Count
    capacity_after: Count
    tau_tokens: Count = 50
    """How little may lag when it is committed."""
    bytes_per_s: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    """What each rank sends at most. None: as fast as it goes."""
    deadline_s: float = Field(default=120.0, gt=0.0, le=3_600.0, allow_inf_nan=False)
    """From the begin to the commit."""


class ChangeStatus(Part, StagesInProgress):
    """A change, as its worker sees it."""

    change_id: ChangeId
    phase: WorkerPhase
    orders: LayoutOrders
    capacity_before: Count
    left_s: float
    """Until its deadline; of no matter once it is being committed."""
    stages: tuple[StageProgress, ...] = ()
    """Those that get layers."""
    scheduled_tokens: Count = 0
    committed: CommitMode | None = None
    """How, once it is."""
    stop_ns: tuple[Count, ...] = ()
    """Per stage, once it is committed: how long it was held back."""
    last_patch_tokens: Count = 0
    last_patch_bytes: Count = 0
    moves_waited_ns: Count = 0
    """How long it took until no request moved."""
    epoch: Count = 0
    """Once it has ended: afterwards."""
    refusal: LayoutRefusal | None = None
    reason: Reason = ""


class LayoutAsk(Message):
    """Coordinator -> worker: what is there, and how far is the change? Asking for one keeps it alive."""

    kind: Literal["layout_ask"] = "layout_ask"
    owner: Owner | None = None
    """None: whoever answers."""
    change_id: ChangeId | None = None


class LayoutOrder(Message):
    """Coordinator -> worker: take this step. Answered when it is done; again, it is not done again."""

    kind: Literal["layout_order"] = "layout_order"
    owner: Owner
    """Whom it is meant for; another incarnation refuses."""
    change_id: ChangeId
    step: LayoutStep
    orders: LayoutOrders | None = None
    """With `begin`."""
    reason: Reason = ""
    """With `abort`."""
    refusal: LayoutRefusal | None = None
    """With `abort`: what it is to be remembered as."""


class LayoutReply(Message):
    """Worker -> coordinator."""

    kind: Literal["layout_reply"] = "layout_reply"
    owner: Owner
    facts: LayoutFacts
    change: ChangeStatus | None
    """The one that was asked for, also if it has ended lately; else the one that is under way."""
    refusal: LayoutRefusal | None = None
    """Why the step wasn't taken."""
    reason: Reason = ""


# ---- coordinator and operators


class ReconfigureBody(Part):
    """How to change an instance's layout."""

    layers: tuple[Count, ...] = Field(min_length=1, max_length=STAGES_MAX)
    """Of each stage, in order; a stage may have none."""
    dry_run: bool = False
    """Only plan it."""
    commit: CommitMode = CommitMode.DRAIN
    flags: LayoutFlags = LayoutFlags()
    tau_tokens: int = Field(default=50, ge=1, le=1_000_000)
    """Commit when no more than that lags."""
    bytes_per_s: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    """What each rank sends at most. None: as fast as it goes."""
    deadline_s: float = Field(default=120.0, gt=0.0, le=3_600.0, allow_inf_nan=False)
    """If it isn't committed by then, it is undone."""
    wait: bool = False
    """Answer when it has ended; else when it has begun."""


class ReconfigureOrder(Message):
    """Frontend -> coordinator."""

    kind: Literal["reconfigure_order"] = "reconfigure_order"
    instance_id: str = Field(min_length=1, max_length=64)
    body: ReconfigureBody


class ReconfigureCancel(Message):
    """Frontend -> coordinator: undo the change that is under way."""

    kind: Literal["reconfigure_cancel"] = "reconfigure_cancel"
    instance_id: str = Field(min_length=1, max_length=64)


class ReconfigureOutcome(StrEnum):
    """What became of a change."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    """The instance is in its old layout, as if nothing had happened."""
    REFUSED = "refused"
    """It didn't begin."""
    PLANNED = "planned"
    """It was a dry run."""
    LOST = "lost"
    """The instance is gone: whoever follows it has the layout that it is started with."""


class ReconfigureReport(Message):
    """Coordinator -> frontend: one change."""

    kind: Literal["reconfigure_report"] = "reconfigure_report"
    instance_id: str
    owner: Owner | None
    change_id: str
    phase: str
    """A state of the coordinator's table (`docs/layer_moves.md`)."""
    outcome: ReconfigureOutcome | None = None
    """None while it is under way."""
    refusal: LayoutRefusal | None = None
    reason: Reason = ""
    plan: LayoutPlan | None = None
    """None of one that another coordinator has begun."""
    change: ChangeStatus | None = None
    """The newest that its worker has said."""
    epoch: Count = 0
    """The newest that is known."""
    duration_s: float = 0.0
    """From the order to the end, or to now."""
    phases_s: dict[str, float] = Field(default_factory=dict)
    """What each phase has taken so far."""
    lag_tokens: tuple[tuple[float, Count], ...] = Field(default=(), max_length=LAG_POINTS_MAX)
    """Seconds since the order, and what lagged then; every second point is left out when there are too many."""


class ReconfigurationsRequest(Message):
    """Frontend -> coordinator: which changes?"""

    kind: Literal["reconfigurations_request"] = "reconfigurations_request"
    instance_id: str | None = Field(default=None, min_length=1, max_length=64)
    """Only of that one."""


class ReconfigurationsReply(Message):
    """Coordinator -> frontend."""

    kind: Literal["reconfigurations_reply"] = "reconfigurations_reply"
    coordinator_id: str
    incarnation: int
    running: tuple[ReconfigureReport, ...] = ()
    ended: tuple[ReconfigureReport, ...] = Field(default=(), max_length=CHANGES_LISTED_MAX)
    """The newest ones, newest last."""
