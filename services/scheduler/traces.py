"""What the spans of a scheduler say."""

from meshift.services.scheduler.policy.dispatch import DispatchDecision
from meshift.tracing import names
from meshift.tracing.spans import Attributes

ALTERNATIVES_MAX = 8
"""In one span."""


def describe_decision(decision: DispatchDecision) -> Attributes:
    """The attributes of a dispatch: what was decided, and what spoke against the others."""
    explanation = decision.explain()
    rejected = [f"{other.name}: {other.rejected}" for other in explanation.alternatives if other.rejected]
    return {
        names.DISPATCH_CANDIDATES: len(decision.instances),
        names.DISPATCH_POLICY: str(decision.settings.policy),
        names.DISPATCH_REJECTED: rejected[:ALTERNATIVES_MAX],
        names.OWNER: str(decision.owner),
        names.DISPATCH_REASON: decision.reason,
    }
