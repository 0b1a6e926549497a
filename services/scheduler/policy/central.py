"""A centralized scheduler, to compare with (Llumnix, section 6.6): it has every request of every instance, tracks each
at every step, and says at each step of an instance which requests the next one computes, as an engine's own scheduler
does for its own. Instances wait for that.

Its state and its work grow with requests and steps; those of the global scheduler with instances and reports.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from meshift.schemas.identity import Owner
from meshift.services.scheduler.policy.ordered import Ordered


@dataclass(slots=True)
class _Request:
    request_id: str
    tokens: int
    pages: int = 0


@dataclass(slots=True)
class _Instance:
    """One instance's requests."""

    place: int
    free: int
    """Pages."""
    running: dict[str, _Request] = field(default_factory=dict)
    """In the order of their admission."""
    waiting: deque[_Request] = field(default_factory=deque)
    load: int = 0
    """Tokens that its requests have, those of its queue included."""


@dataclass(frozen=True, slots=True)
class Step:
    """What an instance's next step is to do."""

    admitted: tuple[str, ...]
    """To be prefilled: from now on in the batch."""
    preempted: tuple[str, ...]
    """Out of the batch; their pages are free."""
    running: int
    """Requests in the batch."""


class CentralScheduler:
    """Everything that runs anywhere. Capacities are of each instance."""

    def __init__(self, owners: Sequence[Owner], pages: int, page_size: int) -> None:
        self._owners = tuple(owners)
        self._page_size = page_size
        self._instances = {owner: _Instance(place, pages) for place, owner in enumerate(self._owners)}
        self._loads = Ordered()
        self._loads.fill(dict.fromkeys(range(len(self._owners)), 0.0))
        self._turn = 0

    def dispatch(self, request_id: str, prompt: int) -> Owner:
        """The least loaded of this very step; ties go round-robin. Raises ValueError if there are no instances."""
        place = self._loads.best(self._turn % max(1, len(self._owners)))
        if place is None:
            raise ValueError("there are no instances")
        self._turn += 1
        owner = self._owners[place]
        instance = self._instances[owner]
        instance.waiting.append(_Request(request_id, prompt))
        self._add_load(instance, prompt)
        return owner

    def on_step(self, owner: Owner, finished: Iterable[str]) -> Step:
        """A step of that instance gave each request of its batch a token, and was the last one of some (unknown ones
        are ignored). Returns what the next one does. Raises KeyError for an unknown instance."""
        instance = self._instances[owner]
        load = len(instance.running)
        for request in instance.running.values():
            request.tokens += 1
        for request_id in finished:
            ended = instance.running.pop(request_id, None)
            if ended is not None:
                load -= ended.tokens
                instance.free += ended.pages
        preempted = self._grow(instance)
        # What had to leave a moment ago finds no room now either.
        admitted = () if preempted else self._admit(instance)
        self._add_load(instance, load)
        return Step(admitted, preempted, len(instance.running))

    def load(self, owner: Owner) -> int:
        """Tokens there now."""
        return self._instances[owner].load

    def requests(self) -> int:
        """All that are tracked."""
        return sum(len(instance.running) + len(instance.waiting) for instance in self._instances.values())

    def _grow(self, instance: _Instance) -> tuple[str, ...]:
        """A page to each that has filled its last one; while there is none, the one admitted last gives way."""
        preempted = []
        for request in list(instance.running.values()):
            if request.request_id not in instance.running or request.tokens < request.pages * self._page_size:
                continue
            while not instance.free and len(instance.running) > 1:
                request_id, last = instance.running.popitem()
                instance.free += last.pages
                last.pages = 0
                instance.waiting.appendleft(last)
                preempted.append(request_id)
            if request.request_id in instance.running and instance.free:
                request.pages += 1
                instance.free -= 1
        return tuple(preempted)

    def _admit(self, instance: _Instance) -> tuple[str, ...]:
        admitted = []
        while instance.waiting:
            # One more than its tokens need, so that its first step has room.
            pages = instance.waiting[0].tokens // self._page_size + 1
            if pages > instance.free:
                break
            request = instance.waiting.popleft()
            request.pages = pages
            instance.free -= pages
            instance.running[request.request_id] = request
            admitted.append(request.request_id)
        return tuple(admitted)

    def _add_load(self, instance: _Instance, tokens: int) -> None:
        if tokens:
            instance.load += tokens
            self._loads.put(instance.place, -float(instance.load))
