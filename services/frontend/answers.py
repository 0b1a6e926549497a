"""What a frontend tells owners about their events: acknowledged, stale, cancelled. One message per owner and kind."""

from dataclasses import dataclass

from meshift.schemas import subjects
from meshift.schemas.errors import OverloadError
from meshift.schemas.identity import FrontendRef, Owner, RequestKey
from meshift.schemas.requests import Acknowledge, Cancel
from meshift.services.bus.base import Bus

CANCEL_SENDS = 3
"""A cancel is at most once on the wire, and a request that waits in a queue sends no event that would be answered
again: so a cancel is repeated, once a tick."""

REPEATED_CANCELS_MAX = 65_536


@dataclass(slots=True)
class _Repeat:
    owner: Owner
    key: RequestKey
    sends_left: int


class Answers:
    """Collects, and sends on `flush`."""

    def __init__(self, bus: Bus, frontend: FrontendRef) -> None:
        self._bus = bus
        self._frontend = frontend
        self._acknowledged: dict[Owner, list[RequestKey]] = {}
        self._stale: dict[Owner, list[RequestKey]] = {}
        self._repeats: list[_Repeat] = []

    def acknowledge(self, owner: Owner, key: RequestKey) -> None:
        """The finish of `key` has arrived."""
        self._acknowledged.setdefault(owner, []).append(key)

    def stale(self, owner: Owner, key: RequestKey, finished: bool) -> None:
        """`key` isn't wanted from `owner` (any more)."""
        (self._acknowledged if finished else self._stale).setdefault(owner, []).append(key)

    def cancel(self, owner: Owner, key: RequestKey) -> None:
        """Stop `key`; sent at once, and again for some ticks."""
        self._send_cancel(owner, (key,))
        if len(self._repeats) < REPEATED_CANCELS_MAX:
            self._repeats.append(_Repeat(owner, key, CANCEL_SENDS - 1))

    def repeat_cancels(self) -> None:
        """Once a tick."""
        by_owner: dict[Owner, list[RequestKey]] = {}
        for repeat in self._repeats:
            by_owner.setdefault(repeat.owner, []).append(repeat.key)
            repeat.sends_left -= 1
        self._repeats = [repeat for repeat in self._repeats if repeat.sends_left > 0]
        for owner, keys in by_owner.items():
            self._send_cancel(owner, tuple(keys))

    def flush(self) -> None:
        """Send what was collected."""
        acknowledged, self._acknowledged = self._acknowledged, {}
        stale, self._stale = self._stale, {}
        for owner, keys in acknowledged.items():
            message = Acknowledge(frontend=self._frontend, owner=owner, keys=tuple(keys))
            self._publish(subjects.worker_acknowledge(owner.instance_id), message)
        for owner, keys in stale.items():
            self._send_cancel(owner, tuple(keys), stale=True)

    def _send_cancel(self, owner: Owner, keys: tuple[RequestKey, ...], *, stale: bool = False) -> None:
        message = Cancel(frontend=self._frontend, owner=owner, keys=keys, stale=stale)
        self._publish(subjects.worker_cancel(owner.instance_id), message)

    def _publish(self, subject: str, message: Acknowledge | Cancel) -> None:
        try:
            self._bus.publish(subject, message)
        except OverloadError:
            # The owner sends the finish, or the stale event, again: then it is answered again.
            return
