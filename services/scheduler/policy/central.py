"""A centralized scheduler, to compare with (Llumnix, section 6.6): tracks each request of each instance at each step.

Its state and its work grow with requests and steps; that of the global scheduler with instances and reports.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from meshift.schemas.identity import Owner


@dataclass(slots=True)
class TrackedInstance:
    """One instance's requests: their tokens, by id."""

    owner: Owner
    capacity: int
    tokens: dict[str, int] = field(default_factory=dict)
    load: int = 0
    """Sum of the tokens."""


class CentralTracker:
    """Everything that runs anywhere."""

    def __init__(self, instances: Iterable[TrackedInstance]) -> None:
        self._instances = {instance.owner: instance for instance in instances}
        self._turn = 0

    def dispatch(self, request_id: str, prompt: int) -> Owner:
        """The least loaded of this very step; ties go round-robin. Raises ValueError if there are no instances."""
        self._turn += 1
        count = len(self._instances)
        ranked = enumerate(self._instances.values())
        _, chosen = min(ranked, key=lambda entry: (entry[1].load, (entry[0] - self._turn) % count))
        chosen.tokens[request_id] = prompt
        chosen.load += prompt
        return chosen.owner

    def on_step(self, owner: Owner, request_ids: Sequence[str], finished: Iterable[str]) -> None:
        """A step gave each of these a token, and was the last one of some. Unknown ones are ignored."""
        instance = self._instances[owner]
        tokens = instance.tokens
        for request_id in request_ids:
            if request_id in tokens:
                tokens[request_id] += 1
                instance.load += 1
        for request_id in finished:
            instance.load -= tokens.pop(request_id, 0)

    def load(self, owner: Owner) -> int:
        """Tokens there now."""
        return self._instances[owner].load

    def requests(self) -> int:
        """All that are tracked."""
        return sum(len(instance.tokens) for instance in self._instances.values())
