"""Virtual usage (Llumnix, section 4.4.2, Algorithm 1): what an instance's requests count as, in tokens.

| request | virtual usage |
|---|---|
| waiting, head of the line | its demand |
| waiting, not head of the line | 0 |
| running | its physical usage, plus its share of its class's headroom on this instance |
| the fake one of an instance that drains | infinity |

The headroom of a class is shared by its running requests, so that it is bounded however many there are; one that only
waits has none and pushes nobody away.
"""

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from meshift.backends.base import ClassUsage
from meshift.schemas.base import trusted
from meshift.schemas.instances import ClassLoad

HeadroomReading = Literal["target_load", "reservation"]
"""The paper's text says both: push others away until only the target load is left (`max(0, M - target_load)`), or keep
that many tokens free."""

HeadroomSum = Literal["additive", "maximum"]
"""What the headrooms of several classes on one instance come to."""


class PriorityClass(BaseModel):
    """Requests of one execution priority."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    execution: int
    """The least execution priority of its requests; those below every class are of the lowest."""
    target_load: int | None = Field(default=None, ge=0)
    """Tokens of load at which it decodes at near-ideal speed; None: no headroom."""


class VirtualUsageSettings(BaseModel):
    """The classes and the readings. The default is the paper's: `high` with 1,600 tokens, and `normal`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    classes: tuple[PriorityClass, ...] = (
        PriorityClass(name="high", execution=1, target_load=1600),
        PriorityClass(name="normal", execution=0),
    )
    reading: HeadroomReading = "target_load"
    combination: HeadroomSum = "additive"

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        executions = [item.execution for item in self.classes]
        if not executions or executions != sorted(set(executions), reverse=True):
            raise ValueError("classes are listed with their execution priorities descending, each once")
        return self

    def class_of(self, execution: int) -> PriorityClass:
        """The class of a request with that execution priority."""
        for item in self.classes:
            if execution >= item.execution:
                return item
        return self.classes[-1]

    def headroom(self, priority_class: PriorityClass, capacity: int) -> int:
        """What one instance of `capacity` tokens keeps free for the class while some of it runs there."""
        if priority_class.target_load is None:
            return 0
        if self.reading == "reservation":
            return priority_class.target_load
        return max(0, capacity - priority_class.target_load)

    def combined(self, headrooms: Sequence[int]) -> int:
        """The headroom of an instance whose classes have these."""
        if self.combination == "maximum":
            return max(headrooms, default=0)
        return sum(headrooms)


def class_loads(
    usages: Sequence[ClassUsage], capacity: int, settings: VirtualUsageSettings
) -> tuple[tuple[ClassLoad, ...], int]:
    """Load by class, the most protected first, and the instance's headroom."""
    if not usages:
        return (), 0
    if len(usages) == 1 and usages[0].running:
        # Nearly always.
        usage = usages[0]
        load = _class_load(settings.class_of(usage.execution), usage.running, usage.used, capacity, settings)
        return (load,), load.headroom
    totals: dict[int, tuple[PriorityClass, int, int]] = {}
    for usage in usages:
        item = settings.class_of(usage.execution)
        _, running, used = totals.get(item.execution, (item, 0, 0))
        totals[item.execution] = (item, running + usage.running, used + usage.used)
    loads = tuple(
        _class_load(*totals[execution], capacity, settings)
        for execution in sorted(totals, reverse=True)
        if any(totals[execution][1:])
    )
    return loads, settings.combined([load.headroom for load in loads])


def _class_load(
    item: PriorityClass, running: int, used: int, capacity: int, settings: VirtualUsageSettings
) -> ClassLoad:
    headroom = settings.headroom(item, capacity) if running else 0
    return trusted(ClassLoad, name=item.name, execution=item.execution, running=running, used=used, headroom=headroom)


def request_usage(
    *,
    physical: int,
    execution: int,
    running_of_class: int,
    capacity: int,
    settings: VirtualUsageSettings,
) -> float:
    """CalcVirtualUsage of one running request: its tokens and its share of the headroom."""
    headroom = settings.headroom(settings.class_of(execution), capacity)
    return physical + headroom / max(running_of_class, 1)


def waiting_usage(demand: int, is_head: bool) -> int:
    """CalcVirtualUsage of a waiting request."""
    return demand if is_head else 0


def freeness_at(*, capacity: int, used: int, reserved: int, head_demand: int, running: int, headroom: int) -> float:
    """`(M - V) / B` of the instance itself, by which its worker knows when it has given enough away."""
    return (capacity - used - reserved - head_demand - headroom) / max(running, 1)
