"""Our histogram counts as Prometheus' own does."""

import random

from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as Reference

from meshift.tracing.histogram import LATENCY_BOUNDS_S, Histogram


def test_it_counts_as_the_library_does() -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    registry = CollectorRegistry()
    reference = Reference("reference", "", buckets=LATENCY_BOUNDS_S, registry=registry)
    ours = Histogram(LATENCY_BOUNDS_S)
    for _ in range(500):
        value = rng.choice([rng.uniform(0, 1), rng.uniform(0, 100), rng.choice(LATENCY_BOUNDS_S)])
        times = rng.randint(1, 3)
        ours.observe(value, times)
        for _ in range(times):
            reference.observe(value)
    for bound, count in ours.buckets():
        assert registry.get_sample_value("reference_bucket", {"le": bound}) == count, f"seed {seed}"
    total = registry.get_sample_value("reference_sum")
    assert total is not None
    assert abs(total - ours.total) < 1e-6 * total
    assert registry.get_sample_value("reference_count") == ours.count


def test_what_is_above_all_bounds_counts() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe(3.0, 4)
    assert list(histogram.buckets()) == [("1.0", 0), ("2.0", 0), ("+Inf", 4)]
    assert (histogram.count, histogram.total) == (4, 12.0)
