"""What is known of one reconfiguration: for its report."""

from dataclasses import dataclass, field

from meshift.schemas.identity import Owner
from meshift.schemas.layouts import LAG_POINTS_MAX, LayoutPlan, LayoutRefusal
from meshift.schemas.limits import REASON_CHARS_MAX
from meshift.schemas.reconfiguring import ChangeStatus, ReconfigureOutcome, ReconfigureReport
from meshift.services.coordinator.table import State

OUTCOMES = {
    State.COMMITTED: ReconfigureOutcome.COMMITTED,
    State.ABORTED: ReconfigureOutcome.ABORTED,
    State.REFUSED: ReconfigureOutcome.REFUSED,
    State.PLANNED: ReconfigureOutcome.PLANNED,
    State.LOST: ReconfigureOutcome.LOST,
}


@dataclass(slots=True)
class Record:
    """Times are the loop's, in seconds."""

    owner: Owner
    change_id: str
    begin_s: float
    plan: LayoutPlan | None = None
    change: ChangeStatus | None = None
    epoch: int = 0
    refusal: LayoutRefusal | None = None
    reason: str = ""
    entered_s: float = 0.0
    """When its present state began."""
    phases_s: dict[str, float] = field(default_factory=dict)
    lag: list[tuple[float, int]] = field(default_factory=list)
    end_s: float | None = None

    def note(self, refusal: LayoutRefusal | None, reason: str) -> None:
        """Why it doesn't go as it should."""
        self.refusal, self.reason = refusal, reason[:REASON_CHARS_MAX]

    def leave(self, state: State, now_s: float) -> None:
        """That state has ended."""
        self.phases_s[state.value] = self.phases_s.get(state.value, 0.0) + now_s - self.entered_s
        self.entered_s = now_s

    def look(self, now_s: float, lag_tokens: int) -> None:
        """What lags now. Of too many points, every second one goes."""
        self.lag.append((round(now_s - self.begin_s, 4), lag_tokens))
        if len(self.lag) > LAG_POINTS_MAX:
            del self.lag[1::2]

    def report(self, state: State, now_s: float) -> ReconfigureReport:
        """As of now."""
        until_s = now_s if self.end_s is None else self.end_s
        return ReconfigureReport(
            instance_id=self.owner.instance_id,
            owner=self.owner,
            change_id=self.change_id,
            phase=state.value,
            outcome=OUTCOMES.get(state),
            refusal=self.refusal,
            reason=self.reason,
            plan=self.plan,
            change=self.change,
            epoch=self.epoch,
            duration_s=until_s - self.begin_s,
            phases_s=dict(self.phases_s),
            lag_tokens=tuple(self.lag),
        )
