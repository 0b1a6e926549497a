"""The waiting requests."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from meshift.backends.sim.parameters import SimParameters
from meshift.backends.sim.request import SimRequest


def _order(request: SimRequest) -> tuple[int, int, int]:
    return -request.priority.scheduling, request.arrived_ns, request.sequence


class WaitingQueue:
    """Higher scheduling priority first, then by arrival: a preempted request goes before those that came later."""

    def __init__(self, parameters: SimParameters) -> None:
        self._parameters = parameters
        self._requests: list[SimRequest] = []
        self.demand = 0
        """Pages that all of them need to start."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[SimRequest]:
        return iter(self._requests)

    @property
    def head(self) -> SimRequest | None:
        """The next one to start."""
        return self._requests[0] if self._requests else None

    @property
    def head_demand(self) -> int:
        """Pages that the head needs to start."""
        return self.pages_of(self._requests[0]) if self._requests else 0

    def pages_of(self, request: SimRequest) -> int:
        """Pages that it needs to start."""
        return self._parameters.pages_of(request.known)

    def add(self, request: SimRequest) -> None:
        """Queue it."""
        insort(self._requests, request, key=_order)
        self.demand += self.pages_of(request)

    def pop(self) -> SimRequest:
        """Take the head out."""
        request = self._requests.pop(0)
        self.demand -= self.pages_of(request)
        return request

    def remove(self, request: SimRequest) -> None:
        """Take it out, wherever it is."""
        del self._requests[bisect_left(self._requests, _order(request), key=_order)]
        self.demand -= self.pages_of(request)
