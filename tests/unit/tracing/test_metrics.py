"""The catalogue: names that Prometheus takes, each once."""

from prometheus_client.metrics_core import METRIC_TYPES
from prometheus_client.validation import _is_valid_legacy_labelname, _is_valid_legacy_metric_name

from meshift.tracing import metrics


def test_names_and_labels_are_well_formed() -> None:
    for family, metric in metrics.METRICS.items():
        assert family == metric.family
        assert _is_valid_legacy_metric_name(family), family
        assert not family.endswith("_total"), family
        assert all(map(_is_valid_legacy_labelname, metric.labels)), family
        assert metric.kind in METRIC_TYPES
        assert metric.help.endswith("."), family


def test_no_series_has_two_families() -> None:
    series = [name for metric in metrics.METRICS.values() for name in metric.series]
    assert len(set(series)) == len(series)
    constants = [value for value in vars(metrics).values() if isinstance(value, metrics.Metric)]
    assert len(constants) == len(metrics.METRICS)
