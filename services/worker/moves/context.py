"""What all moves of one worker share."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from meshift.backends.base import Engine, EngineInfo, MovableEngine
from meshift.kv_memory.layout import KvLayout
from meshift.schemas.identity import Owner, RequestKey
from meshift.services.worker.layouts.gate import LayoutGate
from meshift.services.worker.leases import Leases
from meshift.services.worker.moves.base import Destinations
from meshift.services.worker.moves.counters import MoveCounters
from meshift.services.worker.moves.decisions import Rules
from meshift.services.worker.moves.moved import MovedAway
from meshift.services.worker.moves.peers import Peers
from meshift.services.worker.options import WorkerOptions
from meshift.services.worker.requests import RequestRecord, RequestTable
from meshift.tracing.spans import Tracer


@dataclass(slots=True)
class MoveContext:
    """Of a worker whose engine is up."""

    owner: Owner
    engine: Engine
    info: EngineInfo
    requests: RequestTable
    leases: Leases
    peers: Peers
    destinations: Destinations
    options: WorkerOptions
    tracer: Tracer
    close: Callable[[RequestKey], None]
    """Ends every attempt up to that key here, as a cancel does."""
    announce: Callable[[RequestRecord], None]
    """Tells a record's frontend that this is its owner now."""
    moved: MovedAway
    gate: LayoutGate
    counters: MoveCounters = field(default_factory=MoveCounters)

    @property
    def movable(self) -> MovableEngine | None:
        """The engine, if its requests move."""
        engine = self.engine
        return engine if isinstance(engine, MovableEngine) and self.info.layout is not None else None

    @property
    def layout(self) -> KvLayout:
        """The engine's, of now."""
        assert self.gate.kv is not None
        return self.gate.kv

    @property
    def rules(self) -> Rules:
        """From the settings."""
        return Rules(self.options.move_final_pages * self.info.page_size, self.options.move_stages_max)

    def now_s(self) -> float:
        """The loop's."""
        return asyncio.get_running_loop().time()
