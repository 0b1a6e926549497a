"""What can be set about scheduling: one frozen model, replaced as a whole, so that no decision sees half a change."""

from collections.abc import Mapping
from math import ceil
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from meshift.schemas.errors import InvalidRequest

PolicyName = Literal["meshift", "llumnix", "llumnix-base", "infaas++", "round-robin", "central"]
"""Who decides where requests go and whether they move.

- `meshift`: Llumnix with ours: prompts go where they fit, and wait at the scheduler rather than in the wrong queue.
- `llumnix`: as published (section 4.4). `llumnix-base`: the same with all priorities equal.
- `infaas++`: the least memory load, queued demand included; nothing moves.
- `round-robin`: each in its turn; nothing moves.
- `central`: stands for a scheduler that has every request at every step (`policy/central.py`, to compare its cost);
  in the mesh it decides as `infaas++`.
"""

POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)

OUT_BELOW, IN_ABOVE = 3.0, 30.0
OUT_BELOW_MESHIFT, IN_ABOVE_MESHIFT = 10.0, 200.0

CALM_STARTS, START_UNKNOWN_S = 2.0, 30.0
"""So many times what a start takes an instance must not have been wanted to be spare; and what a start is taken to take
before one was seen."""

ScalingFigure = Literal["load", "ratio", "mean"]
"""What decides. `load` (ours): the share of the cluster's memory that requests hold or wait for. The others are held in
the range [`low`, `high`]: `sum(M - V) / sum(B)`, the decode steps that the cluster can take, or the paper's mean of
`(M - V) / B`. One idle instance lifts the mean by M / instances: an overloaded cluster shrinks."""


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class DispatchSettings(_Settings):
    """Where a new request goes. Only the policy `meshift` reads these."""

    hold: bool = Field(True, description="let a prompt that fits nowhere wait at the scheduler, not at an instance")
    hold_s_max: float = Field(0.25, gt=0, le=10, description="longest time until such a prompt is asked for again")
    waiting_max: int = Field(1, ge=1, description="requests that may wait at an instance before others are held")
    queues_share: float = Field(
        0.125, ge=0, le=1, description="share of the instances at which prompts may wait, at least one"
    )
    patience_s: float = Field(
        60.0, ge=0, description="wait after which a prompt may wait at any instance, whatever `queues_share` says"
    )
    margin_steps: float = Field(
        20.0, ge=0, description="decode steps that an instance's batch must have room for beside the prompt"
    )

    def queues_of(self, instances: int) -> int:
        """At how many of so many instances prompts may wait."""
        return max(1, ceil(self.queues_share * instances))


class MigrationSettings(_Settings):
    """Which instances give requests to which."""

    enabled: bool = Field(True, description="move requests at all, where the policy does")
    out_below: float | None = Field(
        None,
        description="freeness (decode steps) below which an instance gives requests away (default: the policy's own)",
    )
    in_above: float | None = Field(None, description="freeness above which an instance takes them (likewise)")
    requeue: bool = Field(True, description="let what waits in a full instance's queue move too (`meshift` only)")
    inflate_over_s: float = Field(
        0.0, ge=0, le=600, description="time over which what the head of a blocked queue needs comes to count in full"
    )
    pair_ttl_s: float = Field(0.25, gt=0, le=60, description="how long a pair holds unless it is renewed")
    reverse_after_s: float = Field(
        5.0, ge=0, description="time in which two instances are not paired the other way round"
    )
    defragment: bool = Field(False, description="choose destinations by packing a blocked prompt's room explicitly")


class HeadroomSettings(_Settings):
    """What priorities may cost the others, over all instances. Only the policy `meshift` reads these."""

    others_slower_max: float | None = Field(
        0.02,
        ge=0,
        le=10,
        description="share by which steps of requests without headroom may last longer (null: no bound)",
    )
    full_step_times: float = Field(
        2.6, gt=1, le=100, description="how many times as long a step takes at full memory as with one request"
    )
    request_tokens: float = Field(
        160.0, ge=0, description="tokens of load that make a step as much longer as one request more does"
    )


class ScalingSettings(_Settings):
    """How many instances there are."""

    enabled: bool = Field(False, description="start and drain instances")
    dry_run: bool = Field(False, description="only say what would be done")
    figure: ScalingFigure = Field(
        "load", description="what decides: memory's load, or decode steps in reserve (`ratio`, or the paper's `mean`)"
    )
    load: float = Field(0.6, gt=0, le=10, description="`load`: share of the memory that is to be held or waited for")
    calm_s: float | None = Field(
        None,
        ge=0,
        description="`load`: how long one isn't wanted before it is spare (default: twice what a start takes)",
    )
    foresight: float = Field(
        1.0,
        ge=0,
        le=10,
        description="`load`: how much of the growth of the load, in the time of a start, is reckoned with",
    )
    low: float = Field(10.0, description="`ratio`, `mean`: freeness below which one is started")
    high: float = Field(60.0, description="likewise: freeness above which one is drained")
    sustain_s: float = Field(
        10.0, ge=0, description="how long it must be beyond the range, or prompts must have room nowhere"
    )
    shortage: bool = Field(
        True, description="start one, too, where prompts wait that have room nowhere; drain none whose requests would"
    )
    instances_min: int = Field(1, ge=1, description="never fewer")
    instances_max: int = Field(16, ge=1, description="never more, those that are starting included")
    start_timeout_s: float = Field(600.0, gt=0, description="a start that takes longer counts as failed")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low {self.low} must be below high {self.high}")
        if self.instances_min > self.instances_max:
            raise ValueError(f"instances_min {self.instances_min} is more than instances_max {self.instances_max}")
        return self

    def calm_after(self, start_s: float | None) -> float:
        """How long one must not have been wanted to be spare, where starts take so long; None: none was seen yet. What
        can be back at once can go at once."""
        if self.calm_s is not None:
            return self.calm_s
        return CALM_STARTS * self.start_after(start_s)

    @staticmethod
    def start_after(start_s: float | None) -> float:
        """How long a start takes, as the last one did; None: none was seen yet."""
        return START_UNKNOWN_S if start_s is None else start_s


def _version(value: int) -> int:
    if value < 1:
        raise ValueError("the version counts from 1")
    return value


class PolicySettings(_Settings):
    """All of it. `replaced` gives the next version."""

    version: Annotated[int, AfterValidator(_version)] = 1
    policy: PolicyName = Field("meshift", description="who decides")
    dispatch: DispatchSettings = DispatchSettings()
    migration: MigrationSettings = MigrationSettings()
    headroom: HeadroomSettings = HeadroomSettings()
    scaling: ScalingSettings = ScalingSettings()

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.out_below >= self.in_above:
            raise ValueError(f"out_below {self.out_below} must be below in_above {self.in_above}")
        return self

    @property
    def out_below(self) -> float:
        """Freeness below which an instance gives requests away. meshift begins earlier: copying takes a while, in which
        the batch grows on."""
        if self.migration.out_below is not None:
            return self.migration.out_below
        return OUT_BELOW_MESHIFT if self.policy == "meshift" else OUT_BELOW

    @property
    def in_above(self) -> float:
        """Freeness above which an instance takes requests. meshift's destinations have room to spare: what it fills by
        moving is no longer there for the next prompt."""
        if self.migration.in_above is not None:
            return self.migration.in_above
        return IN_ABOVE_MESHIFT if self.policy == "meshift" else IN_ABOVE

    @property
    def requeues(self) -> bool:
        """Whether waiting requests move."""
        return self.policy == "meshift" and self.moves and self.migration.requeue

    @property
    def moves(self) -> bool:
        """Whether requests move."""
        movers = ("meshift", "llumnix", "llumnix-base")
        return self.migration.enabled and self.policy in movers

    @property
    def sees_priorities(self) -> bool:
        """Whether headroom counts and the queue is ordered by priority."""
        return self.policy in ("meshift", "llumnix")

    @property
    def sees_classes(self) -> bool:
        """Whether a prompt of high priority goes where it decodes fastest, and its own class's headroom is no obstacle
        to it. As published it is: headroom is load to all."""
        return self.policy == "meshift"

    def replaced(self, changes: Mapping[str, Any]) -> "PolicySettings":
        """These with `changes` (nested by section, `{"migration": {"out_below": 5}}`), checked as a whole, as the next
        version. Raises InvalidRequest naming the field; then nothing has changed."""
        if "version" in changes:
            raise InvalidRequest("the version is counted, not set", param="version")
        merged = _merged(self.model_dump(), changes) | {"version": self.version + 1}
        try:
            return PolicySettings.model_validate(merged)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"]))
            raise InvalidRequest(f"{name}: {first['msg']}" if name else first["msg"], param=name or None) from error


def _merged(old: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(old)
    for key, value in changes.items():
        known = merged.get(key)
        merged[key] = _merged(known, value) if isinstance(known, Mapping) and isinstance(value, Mapping) else value
    return merged
