"""The coordinator's metrics."""

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from meshift.services.coordinator.core import CoordinatorCore
from meshift.services.exposition import counter, gauge, histogram
from meshift.tracing import metrics


class CoordinatorCollector(Collector):
    """Reads when it is asked."""

    def __init__(self, core: CoordinatorCore) -> None:
        self._core = core

    def collect(self) -> Iterator[Family]:
        """Called by the registry."""
        counters = self._core.counters
        yield counter(metrics.RECONFIGURATIONS, counters.ended)
        yield gauge(metrics.RECONFIGURATIONS_RUNNING, len(self._core.running()))
        yield counter(metrics.RECONFIGURATIONS_ADOPTED, counters.adopted)
        yield histogram(metrics.RECONFIGURATION_PHASE, {(name,): taken for name, taken in counters.phases.items()})
