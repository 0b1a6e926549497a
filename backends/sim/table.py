"""The requests that are here, and the keys that were."""

from collections.abc import Iterator

from meshift.backends.bounded import BoundedSet
from meshift.backends.sim.request import SimRequest
from meshift.schemas.identity import RequestKey

KEYS_REMEMBERED_MAX = 100_000
"""Keys that may not come again; the oldest are forgotten."""


class RequestTable:
    """By key."""

    def __init__(self) -> None:
        self._requests: dict[RequestKey, SimRequest] = {}
        self._seen: BoundedSet[RequestKey] = BoundedSet(KEYS_REMEMBERED_MAX)
        self._arrivals = 0
        self.has_priorities = False
        """Whether a request with an execution priority other than 0 was ever here."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[SimRequest]:
        return iter(self._requests.values())

    def get(self, key: RequestKey) -> SimRequest | None:
        """The one that is here under that key."""
        return self._requests.get(key)

    def has_seen(self, key: RequestKey) -> bool:
        """Whether the key was used here, as far back as is remembered."""
        return key in self._requests or key in self._seen

    def add(self, request: SimRequest) -> None:
        """It is here."""
        self._arrivals += 1
        request.sequence = self._arrivals
        self.has_priorities |= request.priority.execution != 0
        self._enter(request)

    def remove(self, request: SimRequest) -> None:
        """It is gone."""
        del self._requests[request.key]

    def rekey(self, request: SimRequest, key: RequestKey) -> None:
        """Its events bear `key` from now on."""
        assert key not in self._requests, f"{key} is in use"
        self.remove(request)
        request.key = key
        self._enter(request)

    def _enter(self, request: SimRequest) -> None:
        self._requests[request.key] = request
        self._seen.add(request.key)
