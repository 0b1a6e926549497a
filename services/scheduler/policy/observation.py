"""What a decision is made of: the instances as they reported, and what the scheduler knows beyond the reports."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from meshift.schemas.identity import Owner
from meshift.schemas.instances import InstanceState, LoadReport


class InstanceObservation(NamedTuple):
    """One instance. Tokens unless said. A named tuple, since one is made for every report."""

    report: LoadReport
    charged_tokens: int = 0
    """Dispatched there, and in no report yet."""
    charged_requests: int = 0
    moving_in: int = 0
    """What pairs let others send there, and no report shows as reserved yet."""

    blocked_s: float = inf
    """How long the head of its queue has waited for room, as reports showed it."""
    execution: int = 0
    """For a request of which execution priority it is looked at: what is kept free for its class, or for lower ones, is
    not kept free from it."""
    granted: int | None = None
    """How much of the headroom counts (`policy/headroom.py`); None: all that is asked for, as published."""
    stalled: bool = False
    """Its engine has ended no step for a while: it is at a long prompt, and whatever comes waits for that."""

    @property
    def owner(self) -> Owner:
        return self.report.owner

    @property
    def is_draining(self) -> bool:
        """It gives everything away and takes nothing."""
        return self.report.state is InstanceState.DRAINING

    @property
    def headroom(self) -> int:
        """What classes above the request's keep free of it. Reports tell only the headroom of all classes together,
        which may be less than the sum of theirs."""
        if self.execution <= 0:
            return self.kept
        above = sum(item.headroom for item in self.report.classes if item.execution > self.execution)
        return min(self.kept, above)

    @property
    def kept(self) -> int:
        """The headroom of all classes together, as far as it counts."""
        return self.report.headroom if self.granted is None else min(self.report.headroom, self.granted)

    @property
    def protected(self) -> int:
        """What requests of classes that have headroom hold."""
        return sum(item.used for item in self.report.classes if item.headroom)

    @property
    def free(self) -> int:
        """Free or evictable now, less what is already promised to dispatches and moves."""
        return self.report.free + self.report.cached - self.charged_tokens - self.moving_in

    @property
    def room(self) -> int:
        """What a new prompt can have at once: those that wait there are served before it."""
        return self.free - self.report.queued_demand

    @property
    def offered(self) -> int:
        """Of the room, what isn't kept free from the request. Where headroom isn't granted but asked for, it is no
        obstacle, as published: it only makes the instance less free."""
        return self.room if self.granted is None else self.room - self.headroom

    @property
    def takes(self) -> int:
        """What it has free for moves."""
        return self.free if self.granted is None else self.free - self.kept

    def inflation(self, over_s: float) -> float:
        """Tokens that the head of the queue counts as, where its demand comes to count in full `over_s` after it began
        to wait; 0: at once, as published."""
        demand = self.report.head_demand
        return demand if self.blocked_s >= over_s else demand * self.blocked_s / over_s

    @property
    def waiting(self) -> int:
        """Requests that wait there for room, those on their way included when they will have to."""
        return self.report.waiting + (self.charged_requests if self.room < 0 else 0)


@dataclass(frozen=True, slots=True)
class Alternative:
    """What else could have been chosen, with the figures that decided."""

    name: str
    figures: Mapping[str, float]
    rejected: str = ""
    """Why it wasn't; empty for the one that was."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """A decision in words and figures, for traces, the dashboard and whoever asks."""

    decision: str
    why: str
    inputs: Mapping[str, object] = field(default_factory=dict)
    alternatives: Sequence[Alternative] = ()
