"""What changes of the layout need of their worker."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from meshift.backends.base import EngineLoad
from meshift.backends.layouts import LayoutNow
from meshift.services.worker.layouts.counters import LayoutCounters
from meshift.services.worker.layouts.gate import LayoutGate
from meshift.services.worker.options import WorkerOptions


@dataclass(slots=True)
class LayoutContext:
    """Of a worker whose engine is up."""

    options: WorkerOptions
    gate: LayoutGate
    load: Callable[[], EngineLoad]
    halt_moves: Callable[[], None]
    """Moves that can be stopped are; the gate is closed."""
    moves_under_way: Callable[[], int]
    """Into the instance and out of it."""
    entered: Callable[[LayoutNow], None]
    """The engine is in that layout."""
    counters: LayoutCounters = field(default_factory=LayoutCounters)

    def now_s(self) -> float:
        """The loop's."""
        return asyncio.get_running_loop().time()
