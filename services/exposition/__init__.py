"""Metrics for Prometheus: what services count, read when it is asked for. Each service has a registry of its own."""

from meshift.services.exposition.families import BusCollector, counter, gauge, histogram
from meshift.services.exposition.registry import Exposition

__all__ = ["BusCollector", "Exposition", "counter", "gauge", "histogram"]
