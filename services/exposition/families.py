"""From plain numbers to Prometheus' families, by the catalogue of metrics."""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from meshift.services.bus.base import BusCounters
from meshift.tracing import metrics
from meshift.tracing.histogram import Histogram
from meshift.tracing.metrics import Metric

Labels = tuple[str, ...]


def counter(metric: Metric, values: Mapping[Labels, float] | float) -> Family:
    """A counter; `values` by label values, or the only one."""
    family = CounterMetricFamily(metric.family, metric.help, labels=metric.labels)
    for labels, value in _by_labels(values):
        family.add_metric(labels, value)
    return family


def gauge(metric: Metric, values: Mapping[Labels, float] | float) -> Family:
    """A gauge; likewise."""
    family = GaugeMetricFamily(metric.family, metric.help, labels=metric.labels)
    for labels, value in _by_labels(values):
        family.add_metric(labels, value)
    return family


def histogram(metric: Metric, values: Mapping[Labels, Histogram] | Histogram) -> Family:
    """A histogram; likewise."""
    family = HistogramMetricFamily(metric.family, metric.help, labels=metric.labels)
    by_labels = [((), values)] if isinstance(values, Histogram) else list(values.items())
    for labels, value in by_labels:
        family.add_metric(labels, list(value.buckets()), value.total)
    return family


def _by_labels(values: Mapping[Labels, float] | float) -> Iterable[tuple[Labels, float]]:
    return values.items() if isinstance(values, Mapping) else [((), values)]


class BusCollector(Collector):
    """What every service has."""

    def __init__(self, service: str, counters: BusCounters) -> None:
        self._labels = (service,)
        self._counters = counters

    def collect(self) -> Iterator[Family]:
        """Called by the registry."""
        counters = self._counters
        for metric, value in (
            (metrics.BUS_PUBLISHED, counters.published),
            (metrics.BUS_RECEIVED, counters.received),
            (metrics.BUS_DROPPED, counters.dropped),
            (metrics.BUS_INVALID, counters.invalid),
            (metrics.BUS_HANDLER_ERRORS, counters.handler_errors),
            (metrics.BUS_RECONNECTS, counters.reconnects),
        ):
            yield counter(metric, {self._labels: value})
