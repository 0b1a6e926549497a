"""The worker's metrics. KV cache and batch are in its load reports; frontends export those."""

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from meshift.schemas.memory import MemoryReply, MemoryUnits
from meshift.services.exposition import counter, gauge, histogram
from meshift.services.worker.core import WorkerCore
from meshift.services.worker.layouts.worker_layouts import WorkerLayouts
from meshift.services.worker.moves.worker_moves import WorkerMoves
from meshift.tracing import metrics


class WorkerCollector(Collector):
    """Reads when it is asked."""

    def __init__(self, core: WorkerCore) -> None:
        self._core = core
        self._labels = (core.owner.instance_id,)

    def collect(self) -> Iterator[Family]:
        """Called by the registry."""
        counters, name = self._core.counters, self._core.owner.instance_id
        load = self._core.load()
        yield counter(metrics.ENGINE_STEPS, {self._labels: load.step_count} if load is not None else {})
        yield counter(metrics.SUBMISSIONS, {(name, what): count for what, count in counters.submissions.items()})
        yield counter(metrics.REQUESTS_ENDED, {(name, reason): count for reason, count in counters.ended.items()})
        yield gauge(metrics.UNACKNOWLEDGED, {self._labels: self._core.unacknowledged()})
        for metric, value in (
            (metrics.PREEMPTIONS, counters.preemptions),
            (metrics.PREEMPTION_LOSS, counters.preemption_loss_ns / 1e9),
            (metrics.RESENT, counters.resent),
            (metrics.LEASES_ENDED, counters.leases_ended),
            (metrics.BATCHES_LOST, counters.batches_lost),
        ):
            yield counter(metric, {self._labels: value})
        yield from self._memory(self._core.memory())
        yield from self._moves(self._core.moves) if load is not None else ()
        yield from self._layouts(self._core.layouts) if load is not None else ()

    def _memory(self, memory: MemoryReply | None) -> Iterator[Family]:
        """Without values as long as they aren't known."""
        labels = self._labels
        units = memory.units if memory is not None else None
        resident = memory.resident_bytes if memory is not None else None
        yield gauge(metrics.KV_PAGES, {labels: memory.pages} if memory is not None else {})
        yield gauge(metrics.KV_PAGE_TOKENS, {labels: memory.page_tokens} if memory is not None else {})
        yield gauge(metrics.KV_RESIDENT, {labels: resident} if resident is not None else {})
        yield gauge(metrics.KV_GROUPS, {labels: units.groups} if units is not None else {})
        yield gauge(metrics.KV_COMMITTED, {labels: units.committed_bytes} if units is not None else {})
        yield gauge(metrics.KV_WASTE, {labels: units.waste_bytes} if units is not None else {})
        yield from self._by_group(units)

    def _by_group(self, units: MemoryUnits | None) -> Iterator[Family]:
        layers: dict[tuple[str, ...], float] = {}
        waste: dict[tuple[str, ...], float] = {}
        counts: dict[tuple[str, ...], float] = {}
        if units is not None:
            full, last = (*self._labels, "full"), (*self._labels, "last")
            layers = {full: units.layers_per_group, last: units.last_group_layers}
            waste = {full: units.unit_waste_bytes, last: units.last_unit_waste_bytes}
            given_up = units.units - units.committed
            counts = {(*self._labels, "committed"): units.committed, (*self._labels, "given_up"): given_up}
        yield gauge(metrics.KV_GROUP_LAYERS, layers)
        yield gauge(metrics.KV_UNIT_WASTE, waste)
        yield gauge(metrics.KV_UNITS, counts)

    def _layouts(self, layouts: WorkerLayouts) -> Iterator[Family]:
        counters, name, labels = layouts.counters, self._core.owner.instance_id, self._labels
        yield gauge(metrics.LAYOUT_EPOCH, {labels: layouts.epoch})
        yield gauge(metrics.LAYOUT_LAYERS, {(name, str(stage)): count for stage, count in enumerate(layouts.layers)})
        yield counter(metrics.LAYOUT_CHANGES, {(name, *how): count for how, count in counters.ended.items()})
        yield counter(metrics.LAYOUT_BYTES, {labels: counters.byte_count})
        yield counter(metrics.LAYOUT_ROUNDS, {labels: counters.rounds})
        yield histogram(metrics.LAYOUT_DURATION, {labels: counters.durations})
        yield histogram(metrics.LAYOUT_STOP, {labels: counters.stops})

    def _moves(self, moves: WorkerMoves) -> Iterator[Family]:
        counters, name = moves.counters, self._core.owner.instance_id
        yield counter(metrics.MOVES, {(name, *how): count for how, count in counters.ended.items()})
        yield counter(metrics.MOVES_IN, {(name, outcome): count for outcome, count in counters.arrived.items()})
        yield gauge(metrics.MOVES_RUNNING, {(name, "out"): moves.running(), (name, "in"): moves.incoming()})
        yield histogram(metrics.MOVE_DURATION, {self._labels: counters.durations})
        yield histogram(metrics.MOVE_FROZEN, {self._labels: counters.frozen})
        for metric, value in (
            (metrics.MOVE_ROUNDS, counters.rounds),
            (metrics.MOVE_TOKENS, counters.tokens),
            (metrics.MOVE_BYTES, counters.byte_count),
        ):
            yield counter(metric, {self._labels: value})
