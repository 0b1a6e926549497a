"""Which request a source gives away next (Llumnix, section 4.4.3): lowest execution priority, then the shortest.

Ours beside it: a request that moved a moment ago goes last, one that doesn't fit or just failed to go there isn't
chosen, and a class is never pushed away by its own headroom or a lower class's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from meshift.schemas.identity import RequestKey
from meshift.schemas.instances import ClassLoad
from meshift.services.worker.policy.virtual_usage import VirtualUsageSettings, freeness_at


@dataclass(frozen=True, slots=True)
class Movable:
    """A request in the decode phase, or one that waits. Tokens unless said."""

    key: RequestKey
    execution: int
    tokens: int
    """With KV: what a move copies. 0: it waits."""
    moved_s: float | None = None
    """When it came here by a move."""
    failed_s: float | None = None
    """When a move of it to the same destination last came to nothing."""
    is_moving: bool = False
    scheduling: int = 0
    demand: int = 0
    """What it needs to start, if it waits."""


@dataclass(frozen=True, slots=True)
class SourceLoad:
    """The instance as it is now. Tokens unless said."""

    capacity: int
    used: int
    reserved: int
    head_demand: int
    running: int
    classes: tuple[ClassLoad, ...] = ()
    leaving: int = 0
    """Of requests that are moving away already."""
    leaving_requests: int = 0
    is_draining: bool = False


@dataclass(frozen=True, slots=True)
class ChoiceSettings:
    """Tokens unless said."""

    cooldown_s: float = 5.0
    growth: int = 32
    """Room that a request needs beside its tokens: it grows while it is copied."""
    retry_s: float = 5.0
    """Time in which it isn't given to where it failed to go."""

    def backs_off(self, item: Movable, now_s: float) -> bool:
        """What failed is likely to fail again, and each try copies much and costs an attempt."""
        return item.failed_s is not None and now_s - item.failed_s < self.retry_s


@dataclass(frozen=True, slots=True)
class Choice:
    """What moves next, or why nothing does."""

    request: Movable | None
    why: str


def choose_request(
    requests: Sequence[Movable],
    load: SourceLoad,
    *,
    until_freeness: float,
    tokens_max: int,
    now_s: float,
    usage: VirtualUsageSettings,
    settings: ChoiceSettings,
    headroom_max: int | None = None,
) -> Choice:
    """The next one, while the instance's freeness, with what leaves already taken off, is below `until_freeness`.
    `tokens_max`: what the destination still has room for."""
    candidates = [item for item in requests if item.tokens and not item.is_moving]
    if not candidates:
        return Choice(None, "nothing in the decode phase that doesn't move already")
    able = [item for item in candidates if not settings.backs_off(item, now_s)]
    if not able:
        return Choice(None, f"all {len(candidates)} requests failed to go there a moment ago")
    fitting = [item for item in able if item.tokens + settings.growth <= tokens_max]
    if not fitting:
        return Choice(None, f"none of {len(able)} requests fits into {tokens_max} tokens")

    def order(item: Movable) -> tuple[int, bool, int, RequestKey]:
        recent = item.moved_s is not None and now_s - item.moved_s < settings.cooldown_s
        return (usage.class_of(item.execution).execution, recent, item.tokens, item.key)

    chosen = min(fitting, key=order)
    if load.is_draining:
        return Choice(chosen, "the instance drains")
    freeness = freeness_without(load, usage.class_of(chosen.execution).execution, usage, headroom_max)
    if freeness >= until_freeness:
        return Choice(None, f"freeness {freeness:.1f} is at least {until_freeness:g}")
    return Choice(chosen, f"freeness {freeness:.1f} is below {until_freeness:g}; shortest of the lowest class")


def choose_waiting(requests: Sequence[Movable], tokens_max: int, now_s: float, settings: ChoiceSettings) -> Choice:
    """The first of the queue for whose demand the destination has room: the head, or if that is too large one that it
    blocks. The queue's order is by scheduling priority and then that of `requests`, which is of their arrival."""
    waiting = [item for item in requests if not item.tokens and not item.is_moving]
    if not waiting:
        return Choice(None, "nothing waits that doesn't move already")
    queue = sorted(waiting, key=lambda item: -item.scheduling)
    able = [item for item in queue if not settings.backs_off(item, now_s)]
    if not able:
        return Choice(None, f"all {len(queue)} that wait failed to go there a moment ago")
    chosen = next((item for item in able if item.demand <= tokens_max), None)
    if chosen is None:
        least = min(item.demand for item in able)
        return Choice(None, f"those that wait need {least} tokens and more, there are {tokens_max}")
    place = queue.index(chosen)
    where = "head of the queue" if not place else f"{place} before it in the queue"
    return Choice(chosen, f"{where}, {chosen.demand} tokens")


def freeness_without(
    load: SourceLoad, execution: int, usage: VirtualUsageSettings, headroom_max: int | None = None
) -> float:
    """The instance's freeness as a request of that class counts it: of headroom only that of higher classes, and what
    leaves already is gone."""
    headroom = usage.combined([item.headroom for item in load.classes if item.execution > execution])
    if headroom_max is not None:
        headroom = min(headroom, headroom_max)
    return freeness_at(
        capacity=load.capacity,
        used=load.used - load.leaving,
        reserved=load.reserved,
        head_demand=load.head_demand,
        running=load.running - load.leaving_requests,
        headroom=headroom,
    )
