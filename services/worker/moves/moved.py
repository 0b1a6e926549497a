"""Requests that moved away: where they went, and what they gave here, until they are over. Pure: `now_s` comes in."""

from dataclasses import dataclass

from meshift.schemas.identity import Owner, RequestKey
from meshift.services.worker.requests import RequestRecord

MOVED_MAX = 100_000
"""Remembered at most; the oldest go first."""


@dataclass(frozen=True, slots=True)
class Moved:
    """One of them."""

    record: RequestRecord
    destination: Owner
    until_s: float

    @property
    def destination_key(self) -> RequestKey:
        """What it is called there."""
        return self.record.key._replace(hop=self.record.key.hop + 1)


class MovedAway:
    """By request id: the last time that each moved away from here."""

    def __init__(self, kept_s: float) -> None:
        self._kept_s = kept_s
        self._moved: dict[str, Moved] = {}

    def __len__(self) -> int:
        return len(self._moved)

    def add(self, record: RequestRecord, destination: Owner, now_s: float) -> None:
        """It is there now."""
        self._moved.pop(record.key.request_id, None)
        self._moved[record.key.request_id] = Moved(record, destination, now_s + self._kept_s)
        if len(self._moved) > MOVED_MAX:
            del self._moved[next(iter(self._moved))]

    def get(self, key: RequestKey) -> Moved | None:
        """That of exactly the key under which it was here."""
        moved = self._moved.get(key.request_id)
        return moved if moved is not None and moved.record.key == key else None

    def cancelled(self, key: RequestKey) -> Moved | None:
        """Whom a cancel of `key` concerns: it ends the whole attempt, wherever that went."""
        moved = self._moved.get(key.request_id)
        return moved if moved is not None and moved.record.key.attempt <= key.attempt else None

    def over(self, key: RequestKey, destination: Owner) -> RequestRecord | None:
        """The destination says that its `key` is over. Returns what was remembered of it."""
        moved = self._moved.get(key.request_id)
        if moved is None or (moved.destination_key, moved.destination) != (key, destination):
            return None
        del self._moved[key.request_id]
        return moved.record

    def back(self, request_id: str) -> None:
        """It came back."""
        self._moved.pop(request_id, None)

    def expire(self, now_s: float) -> None:
        """Forget those whose time is over. They were added in order of time, so it stops at the first young one."""
        while self._moved:
            oldest = next(iter(self._moved))
            if self._moved[oldest].until_s > now_s:
                return
            del self._moved[oldest]
