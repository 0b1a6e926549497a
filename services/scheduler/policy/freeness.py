"""Freeness: the decode steps that an instance's batch can still take (Llumnix, section 4.4.2)."""

from meshift.schemas.instances import LoadReport


def dispatch_freeness(report: LoadReport, charged: int) -> float:
    """`F = (M - sum of virtual usage) / B` for dispatching: all queued demand counts, and what the scheduler sent
    there since the instance last reported (`charged`, tokens). May be negative; in decode steps."""
    virtual_usage = report.used + report.reserved + report.queued_demand + report.headroom + charged
    return (report.capacity - virtual_usage) / max(report.running, 1)
