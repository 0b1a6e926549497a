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
            return self.report.headroom
        above = sum(item.headroom for item in self.report.classes if item.execution > self.execution)
        return min(self.report.headroom, above)

    @property
    def free(self) -> int:
        """Free or evictable now, less what is already promised to dispatches and moves."""
        return self.report.free + self.report.cached - self.charged_tokens - self.moving_in

    @property
    def room(self) -> int:
        """What a new prompt can have at once: those that wait there are served before it."""
        return self.free - self.report.queued_demand

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
