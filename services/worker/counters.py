"""What a worker counts. Plain numbers: whoever wants them (`metrics.py`) reads them when asked."""

from dataclasses import dataclass, field

from meshift.schemas.requests import Finish


@dataclass(slots=True)
class WorkerCounters:
    """Since the start."""

    submissions: dict[str, int] = field(default_factory=dict)
    """By outcome: `accepted`, or the code of the refusal."""
    ended: dict[str, int] = field(default_factory=dict)
    """By finish reason."""
    preemptions: int = 0
    preemption_loss_ns: int = 0
    resent: int = 0
    leases_ended: int = 0
    batches_lost: int = 0

    def submitted(self, outcome: str) -> None:
        """A submission was answered."""
        self.submissions[outcome] = self.submissions.get(outcome, 0) + 1

    def finished(self, finish: Finish) -> None:
        """The engine ended a request."""
        reason = finish.reason.value
        self.ended[reason] = self.ended.get(reason, 0) + 1
        self.preemptions += finish.preemptions
        self.preemption_loss_ns += finish.preemption_loss_ns
