"""Leases: a request runs for as long as its frontend's incarnation is heard of. Pure: `now_s` comes in."""

from collections.abc import Iterable

from meshift.schemas.identity import FrontendRef
from meshift.services.worker.requests import RequestRecord


class Leases:
    """The newest incarnation of each frontend, and when its lease ends."""

    def __init__(self) -> None:
        self._leases: dict[str, tuple[int, float]] = {}
        self._superseded = False
        """A frontend has, or had, requests of another incarnation than the newest."""

    def renew(self, frontend: FrontendRef, ttl_s: float, now_s: float) -> None:
        """`frontend` lives. An older incarnation than known changes nothing."""
        incarnation, ends_s = self._leases.get(frontend.frontend_id, (frontend.incarnation, 0.0))
        self._superseded |= frontend.incarnation != incarnation
        if frontend.incarnation > incarnation:
            self._leases[frontend.frontend_id] = (frontend.incarnation, now_s + ttl_s)
        elif frontend.incarnation == incarnation:
            self._leases[frontend.frontend_id] = (incarnation, max(ends_s, now_s + ttl_s))

    def is_live(self, frontend: FrontendRef, now_s: float) -> bool:
        """Whether requests of that incarnation may run."""
        incarnation, ends_s = self._leases.get(frontend.frontend_id, (0, 0.0))
        return frontend.incarnation == incarnation and now_s < ends_s

    def left_s(self, frontend: FrontendRef, now_s: float) -> float:
        """Until its lease ends; 0 if it has none."""
        incarnation, ends_s = self._leases.get(frontend.frontend_id, (0, 0.0))
        return max(0.0, ends_s - now_s) if frontend.incarnation == incarnation else 0.0

    def all_last(self, now_s: float) -> bool:
        """Whether no request can be an orphan: each has renewed its frontend's lease when it came. To be asked often,
        for it looks at frontends only."""
        if self._superseded:
            return False
        for _, ends_s in self._leases.values():  # noqa: SIM110 - `all` of a generator takes twice as long
            if ends_s <= now_s:
                return False
        return True

    def orphans(self, requests: Iterable[RequestRecord], now_s: float) -> list[RequestRecord]:
        """Those whose frontends' leases have ended."""
        return [record for record in requests if not self.is_live(record.frontend, now_s)]

    def expire(self, now_s: float, kept_s: float) -> None:
        """Forget frontends whose lease ended `kept_s` ago; their requests must have been cancelled by then."""
        ended = [key for key, (_, ends_s) in self._leases.items() if ends_s + kept_s < now_s]
        for key in ended:
            del self._leases[key]
