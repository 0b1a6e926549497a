"""The scheduler's metrics."""

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from meshift.services.exposition import counter, gauge, histogram
from meshift.services.scheduler.core import SchedulerCore
from meshift.tracing import metrics


class SchedulerCollector(Collector):
    """Reads when it is asked."""

    def __init__(self, core: SchedulerCore) -> None:
        self._core = core

    def collect(self) -> Iterator[Family]:
        """Called by the registry."""
        counters = self._core.counters
        yield counter(metrics.DISPATCHES, {(decision,): count for decision, count in counters.dispatches.items()})
        yield histogram(metrics.DISPATCH_DURATION, counters.duration)
        yield counter(metrics.SCALINGS, {(action,): count for action, count in counters.scalings.items()})
        yield counter(metrics.SCALING_FAILURES, counters.scaling_failures)
        yield gauge(metrics.INSTANCES, len(self._core.instances()))
