"""The live instances, as their load reports show them. Pure: `now_s` comes in.

Of two incarnations of one instance the newest wins. An incarnation that said it goes never comes back; one that
fell silent does when it is heard again (a partition heals).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

from meshift.schemas.identity import Owner
from meshift.schemas.instances import InstanceState, LoadReport


@dataclass(slots=True)
class KnownInstance:
    """The newest report of one instance, and when it came."""

    report: LoadReport
    seen_s: float

    @property
    def owner(self) -> Owner:
        return self.report.owner

    @property
    def takes_requests(self) -> bool:
        return self.report.state is InstanceState.READY


class InstanceView:
    """Instances by id, at most one incarnation of each."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._known: dict[str, KnownInstance] = {}
        """In the order in which they were last heard: who is silent is found without looking at the others."""
        self._names: list[str] | None = None
        """Sorted; None: to be sorted anew."""
        self._newest: dict[str, int] = {}
        """The newest incarnation ever heard of."""
        self._gone: dict[str, int] = {}
        """The newest incarnation that said it goes."""

    def __iter__(self) -> Iterator[KnownInstance]:
        """In the order of their ids, so that a decision doesn't depend on who reported first."""
        if self._names is None:
            self._names = sorted(self._known)
        return iter([self._known[name] for name in self._names])

    def __len__(self) -> int:
        return len(self._known)

    def get(self, owner: Owner) -> KnownInstance | None:
        """That incarnation, if it is live."""
        known = self._known.get(owner.instance_id)
        return known if known is not None and known.owner == owner else None

    def on_report(self, report: LoadReport, now_s: float) -> list[Owner]:
        """Take a report in. Returns the owners that it proves lost: older incarnations of the instance."""
        owner = report.owner
        known = self._known.get(owner.instance_id)
        if known is not None and known.report.owner == owner:
            if report.sequence > known.report.sequence:
                # The last one now.
                del self._known[owner.instance_id]
                self._known[owner.instance_id] = known
                known.report, known.seen_s = report, now_s
            return []
        if owner.incarnation < self._newest.get(owner.instance_id, 0):
            return []
        if owner.incarnation <= self._gone.get(owner.instance_id, -1):
            return []
        self._newest[owner.instance_id] = owner.incarnation
        lost = [] if known is None else [known.owner]
        if self._known.pop(owner.instance_id, None) is None:
            self._names = None
        self._known[owner.instance_id] = KnownInstance(report, now_s)
        return lost

    def on_gone(self, owner: Owner) -> bool:
        """An incarnation says it goes. Returns whether it was live here."""
        gone = self._gone.get(owner.instance_id, -1)
        self._gone[owner.instance_id] = max(gone, owner.incarnation)
        return self.forget(owner)

    def forget(self, owner: Owner) -> bool:
        """It is not there now; when it is heard again, it is. Returns whether it was live here."""
        if self.get(owner) is None:
            return False
        del self._known[owner.instance_id]
        self._names = None
        return True

    def silent(self, now_s: float, for_s: float) -> list[Owner]:
        """Those that have been silent for at least that long, in the order of their ids."""
        silent = takewhile(lambda known: now_s - known.seen_s >= for_s, self._known.values())
        return sorted(known.owner for known in silent)

    def expire(self, now_s: float) -> list[Owner]:
        """Forget those that have been silent for too long; returns them."""
        silent = self.silent(now_s, self._timeout_s)
        for owner in silent:
            self.forget(owner)
        return silent
