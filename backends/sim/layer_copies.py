"""KV of layers on its way from one stage to another: what was applied there, and what was written since.

What the sim engine keeps as KV is a hash a token, whatever the layer. A pair of stages has a copy of it for the layers
that move between them, and after the commit that copy is what there is: a slot that was never sent, or sent before it
was written anew, makes all that follows wrong."""

from array import array
from dataclasses import dataclass, field

from meshift.backends.sim.accounting import scheduled
from meshift.backends.sim.core import EngineCore
from meshift.backends.sim.lifecycle import RequestState
from meshift.backends.sim.request import SimRequest
from meshift.kv_memory.layout import Range

HOLDS_KV = frozenset({RequestState.JOINING, RequestState.RUNNING, RequestState.FROZEN})


@dataclass(slots=True)
class Patch:
    """What one round carries."""

    parts: list[tuple[SimRequest, int, int, bytes]]
    """Request, generation of its pages, first token, slots."""
    tokens: int
    watermark: int


@dataclass(slots=True)
class _Copied:
    generation: int
    slots: "array[int]" = field(default_factory=lambda: array("I"))


class LayerCopy:
    """Of one pair of stages."""

    def __init__(self, core: EngineCore, source: int, destination: int, layers: Range) -> None:
        self._core = core
        self.source = source
        self.destination = destination
        self.layers = layers
        self.applied = 0
        """T_applied."""
        self.rounds = 0
        self.byte_count = 0
        self._copied: dict[SimRequest, _Copied] = {}

    @property
    def layer_count(self) -> int:
        return self.layers[1] - self.layers[0]

    def drain(self) -> Patch:
        """All that was written and not applied yet: a patch that is on its way at the commit is sent again."""
        parts, watermark = [], scheduled(self._core)
        for request in self._holders():
            copied = self._copied.get(request)
            if copied is None or copied.generation != request.page_generation:
                copied = self._copied[request] = _Copied(request.page_generation)
            start, end = len(copied.slots), self._core.counts(request)[0]
            if end > start:
                parts.append((request, copied.generation, start, request.generation.slots(start, end)))
        return Patch(parts, sum(len(slots) for *_, slots in parts) // 4, watermark)

    def apply(self, patch: Patch, byte_count: int) -> None:
        """At the destination."""
        for request, generation, start, slots in patch.parts:
            copied = self._copied.get(request)
            if copied is not None and copied.generation == generation and len(copied.slots) == start:
                copied.slots.frombytes(slots)
        self.applied = patch.watermark
        self.rounds += 1
        self.byte_count += byte_count
        for request in [request for request in self._copied if request.state is RequestState.GONE]:
            del self._copied[request]

    def take_over(self) -> None:
        """The copy is what there is, from now on."""
        for request in self._holders():
            copied = self._copied.get(request)
            slots = copied.slots if copied is not None else array("I")
            request.generation.replace(slots, self._core.counts(request)[1])

    @property
    def lag(self) -> int:
        """T_sched - T_applied; at least 1 before the first round is applied."""
        return max(scheduled(self._core) - self.applied, 0 if self.rounds else 1)

    def _holders(self) -> list[SimRequest]:
        return [request for request in self._core.requests if request.state in HOLDS_KV and request.pages]
