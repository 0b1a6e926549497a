"""The words about an instance's layout, which pipeline stage holds which layers, and about a plan to change it."""

from enum import StrEnum
from itertools import accumulate, pairwise
from typing import Annotated

from pydantic import Field

from meshift.schemas.base import Part
from meshift.schemas.limits import REASON_CHARS_MAX

Reason = Annotated[str, Field(max_length=REASON_CHARS_MAX)]
Count = Annotated[int, Field(ge=0)]
Span = tuple[Count, Count]
"""Layers [start, end) of one stage; an empty stage has start = end."""

STAGES_MAX = 64
LAG_POINTS_MAX = 256
CHANGES_LISTED_MAX = 64

Split = Annotated[tuple[Span, ...], Field(min_length=1, max_length=STAGES_MAX)]
"""The layers of each stage, in order, without gap: all layers of the model."""
ChangeId = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]


class CommitMode(StrEnum):
    """How the stages come to one point of the request stream, to switch there."""

    DRAIN = "drain"
    """The pipeline runs empty first: for any change."""
    LAG = "lag"
    """Each stage switches at its place in the stream, and none waits: for layers that go to a neighbour."""


class LayoutFlags(Part):
    """How a change is done. All false is the way to do it; each of them leaves a part out, to show its worth."""

    no_patch: bool = False
    """KV is copied within the commit, while no stage steps, instead of before."""
    no_async: bool = False
    """Weights are loaded within the commit, while no stage steps, instead of before."""
    no_resize: bool = False
    """Capacity stays as it is, and what needs less is infeasible."""
    restart: bool = False
    """Stop and start: the commit loads everything anew, and requests are computed again."""


class StageProgress(Part):
    """How far a stage that gets layers is: a destination."""

    stage: Count
    layers: Count
    """That it gets."""
    layers_loaded: Count
    """Of these, whose weights are there."""
    lag_tokens: Count
    """T_sched - T_applied (the least of its sources): what was scheduled less what was applied here, by the watermark
    of the last patch. Before the first round is applied: all of T_sched, and at least 1."""
    byte_count: Count = 0
    """Of KV that was applied."""
    rounds: Count = 0
    """The first one, of all live slots, and patches."""


class StagesInProgress:
    """What holds of all `stages` that get layers."""

    __slots__ = ()

    stages: tuple[StageProgress, ...]

    @property
    def weights_loaded(self) -> bool:
        """Everywhere."""
        return all(stage.layers_loaded == stage.layers for stage in self.stages)

    @property
    def lag_tokens(self) -> int:
        """Of the stage that is furthest behind."""
        return max((stage.lag_tokens for stage in self.stages), default=0)


class LayoutRefusal(StrEnum):
    """Why a change can't begin, or go on."""

    UNKNOWN = "unknown"
    """No such change here (any more)."""
    BUSY = "busy"
    """Another change is under way, or something that can't be interrupted: try later."""
    STALE = "stale"
    """Planned for another epoch, or for another incarnation."""
    INVALID = "invalid"
    """Not a split of this model's layers over this instance's stages."""
    UNALIGNED = "unaligned"
    """Not at the boundaries of groups of stacked layers."""
    UNCHANGED = "unchanged"
    """It is the present layout."""
    UNSUPPORTED = "unsupported"
    """This engine can't, or not in this way."""
    NO_MEMORY = "no_memory"
    """Both layouts' layers together, and the requests that run, don't fit."""
    NOT_READY = "not_ready"
    """To be committed, but weights or KV aren't there yet."""
    BROKEN = "broken"
    """A rank, the data plane or the loading of weights failed."""
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    """By an operator, or because the instance leaves."""
    UNREACHABLE = "unreachable"
    """The worker doesn't answer."""


def split_of(layers: tuple[int, ...] | list[int]) -> tuple[tuple[int, int], ...]:
    """Layer ranges from the number of layers of each stage: (16, 14) is ((0, 16), (16, 30))."""
    return tuple(pairwise((0, *accumulate(layers))))


def counts_of(split: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    """The number of layers of each stage: what `split_of` takes."""
    return tuple(end - start for start, end in split)


# ---- what there is


class StageFacts(Part):
    """What the planner must know of one stage, of each of its tensor ranks alike. Bytes."""

    budget: Count | None
    """For layers' weights and KV together. None: unbounded."""
    reserve: Count
    """Of the budget, for neither: embeddings, head, activations."""
    layer_weights: Count
    """Of one layer."""
    block: Annotated[int, Field(ge=1)]
    """Of one page of one group of layers."""


class LayoutFacts(Part):
    """An instance's layout, and what a change of it has to work with. Tokens unless said."""

    split: Split
    epoch: Count
    """One more with every change."""
    layers_per_group: Annotated[int, Field(ge=1)]
    """k: layers move in groups of so many."""
    page_tokens: Annotated[int, Field(ge=1)]
    capacity: Count
    capacity_max: Count
    """The operator's bound."""
    used: Count
    """By requests, and promised to those that move here: what can't be evicted."""
    stages: tuple[StageFacts, ...] = Field(min_length=1, max_length=STAGES_MAX)


class StageTransfer(Part):
    """Layers whose KV goes from one stage to another."""

    source: Count
    destination: Count
    layers: Span


class LayoutPlan(Part):
    """What a change comes to, before it begins (PipeLive, algorithm 1). Tokens unless said."""

    current: Split
    target: Split
    epoch: Count
    """The one that it is planned for."""
    flags: LayoutFlags
    added: tuple[tuple[Count, ...], ...]
    """M_add: layers that each stage loads."""
    moved: tuple[StageTransfer, ...]
    """M_mig: whose KV goes from where to where."""
    deleted: tuple[tuple[Count, ...], ...]
    """M_del: layers that each stage drops after the commit."""
    used: Count
    capacity: Count
    """Now."""
    capacity_during: Count
    """While stages hold both layouts' layers: B_shrink, where that is less than now."""
    capacity_after: Count
    """B_new: what the target has room for, within the operator's bound."""
    weights_bytes: Count
    """To be loaded, by all stages together."""
    kv_bytes: Count
    """To be copied at first: that of the tokens in use."""
    refusal: LayoutRefusal | None = None
    """Why it can't be."""
    reason: Reason = ""
    nearest: tuple[tuple[Count, ...], ...] = ()
    """Layers of each stage, where the target isn't aligned to groups: splits like it that are."""
    words: tuple[str, ...] = ()
    """The plan, to be read."""

    @property
    def feasible(self) -> bool:
        """Whether it may begin."""
        return self.refusal is None
