"""Tells instances which others to give requests to. What it keeps is of a few seconds: a new scheduler needs none."""

from collections.abc import Callable, Sequence

from meshift.schemas import subjects
from meshift.schemas.identity import Owner
from meshift.schemas.instances import LoadReport, MovePair
from meshift.schemas.steering import DecisionSubject
from meshift.services.bus.base import Bus
from meshift.services.scheduler.charges import Charges
from meshift.services.scheduler.counters import SchedulerCounters
from meshift.services.scheduler.decisions import DecisionLog
from meshift.services.scheduler.policy.defragment import pack
from meshift.services.scheduler.policy.observation import InstanceObservation
from meshift.services.scheduler.policy.pairing import Pair, PairingPlan, pair_instances
from meshift.services.scheduler.policy.settings import PolicySettings


class Migration:
    """Of one scheduler."""

    def __init__(
        self,
        scheduler_id: str,
        incarnation: int,
        bus: Bus,
        counters: SchedulerCounters,
        decisions: DecisionLog,
        on_charge: Callable[[Owner], None],
    ) -> None:
        """`on_charge` is told whom a pair lets others send requests to."""
        self._id = scheduler_id
        self._incarnation = incarnation
        self._bus = bus
        self._counters = counters
        self._decisions = decisions
        self._on_charge = on_charge
        self._paired: dict[tuple[Owner, Owner], float] = {}
        self._incoming = Charges()
        self._blocked: dict[Owner, tuple[float, float]] = {}
        self.plans: dict[str, PairingPlan] = {}
        """The newest plan of each model's instances, to be explained to who asks."""

    def moving_in(self, owner: Owner) -> int:
        """Tokens that pairs let others send to `owner`, and no report shows yet."""
        return self._incoming.charged(owner)[0]

    def blocked_s(self, owner: Owner) -> float:
        """From the first of its reports in a row that showed the head of its queue without room to the newest."""
        first_s, newest_s = self._blocked.get(owner, (0.0, 0.0))
        return newest_s - first_s

    def on_report(self, report: LoadReport, now_s: float) -> None:
        """An instance reported."""
        owner = report.owner
        self._incoming.on_report(owner)
        if report.waiting and report.head_demand > report.free + report.cached:
            self._blocked[owner] = (self._blocked.get(owner, (now_s, now_s))[0], now_s)
        else:
            self._blocked.pop(owner, None)

    def forget(self, owner: Owner) -> None:
        """`owner` is gone."""
        self._incoming.forget(owner)
        self._blocked.pop(owner, None)

    def run(
        self,
        models: Sequence[str],
        observe: Callable[[str], list[InstanceObservation]],
        settings: PolicySettings,
        now_s: float,
    ) -> None:
        """A round of reports is complete: pair each model's instances. `observe` gives those with a fresh report."""
        self._expire(settings, now_s)
        self.plans.clear()
        if not settings.moves:
            return
        for model in models:
            observations = observe(model)
            plan = (
                pack(observations, settings, now_s)
                if settings.migration.defragment
                else pair_instances(observations, settings, now_s, self._paired)
            )
            self.plans[model] = plan
            self._remember(model, plan, now_s)
            for pair in plan.pairs:
                self._publish(pair, settings, now_s)

    def _remember(self, model: str, plan: PairingPlan, now_s: float) -> None:
        self._decisions.look(DecisionSubject.PAIR, plan, now_s, model)
        if plan.pairs:
            self._decisions.add(DecisionSubject.PAIR, plan, len(plan.instances), now_s, model)

    def _publish(self, pair: Pair, settings: PolicySettings, now_s: float) -> None:
        self._paired[pair.source, pair.destination] = now_s
        self._incoming.charge(pair.destination, pair.tokens_wanted)
        self._on_charge(pair.destination)
        self._counters.pairs += 1
        message = MovePair(
            scheduler_id=self._id,
            incarnation=self._incarnation,
            source=pair.source,
            destination=pair.destination,
            tokens_max=pair.tokens_max,
            until_freeness=pair.until_freeness,
            ttl_s=pair.expires_s - now_s,
            headroom_max=pair.headroom_max,
            waiting=pair.waiting,
            reason="room for the head of the queue" if pair.waiting else f"freeness below {settings.out_below:g}",
        )
        self._bus.publish(subjects.worker_pair(pair.source.instance_id), message)

    def _expire(self, settings: PolicySettings, now_s: float) -> None:
        old = [pair for pair, when_s in self._paired.items() if now_s - when_s >= settings.migration.reverse_after_s]
        for pair in old:
            del self._paired[pair]
