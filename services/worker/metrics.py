"""The worker's metrics. KV cache and batch are in its load reports; frontends export those."""

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from meshift.services.exposition import counter, gauge
from meshift.services.worker.core import WorkerCore
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
