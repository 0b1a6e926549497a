"""Dispatch: where a new request goes (Llumnix, section 4.4.3, with meshift's check that the prompt fits)."""

from collections.abc import Sequence
from dataclasses import dataclass

from meshift.schemas.identity import Owner
from meshift.schemas.instances import LoadReport
from meshift.services.scheduler.policy.freeness import dispatch_freeness


@dataclass(frozen=True, slots=True)
class Candidate:
    """An instance that takes requests, and what was sent to it that no report shows yet."""

    report: LoadReport
    charged_tokens: int
    charged_requests: int

    @property
    def room(self) -> int:
        """Tokens that a prompt can have at once: free or evictable, less what is already promised."""
        return self.report.free + self.report.cached - self.report.queued_demand - self.charged_tokens


@dataclass(frozen=True, slots=True)
class DispatchDecision:
    """The chosen owner, and why."""

    owner: Owner
    reason: str
    fits: bool = True
    """Whether its prompt has room at once."""


def choose_instance(candidates: Sequence[Candidate], demand: int, turn: int) -> DispatchDecision | None:
    """The freest instance: one where `demand` tokens fit before one where they don't, one with freeness >= 0 before
    a negative one, then by freeness. Ties go round-robin by `turn`. None if there are no candidates."""
    count = len(candidates)
    if not count:
        return None

    def rank(index: int) -> tuple[bool, bool, float, int]:
        candidate = candidates[index]
        freeness = dispatch_freeness(candidate.report, candidate.charged_tokens, candidate.charged_requests)
        return (candidate.room >= demand, freeness >= 0, freeness, -((index - turn) % count))

    best = max(range(count), key=rank)
    fits, _, freeness, _ = rank(best)
    reason = f"freeness {freeness:.1f}, greatest of {count}" + ("" if fits else "; prompt must wait for room")
    return DispatchDecision(candidates[best].report.owner, reason, fits)
