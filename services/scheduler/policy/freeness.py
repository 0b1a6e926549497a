"""Freeness: the decode steps that an instance's batch can still take (Llumnix, section 4.4.2)."""

from meshift.schemas.instances import LoadReport


def dispatch_freeness(report: LoadReport, charged_tokens: int, charged_requests: int) -> float:
    """`F = (M - sum of virtual usage) / B` for dispatching: all queued demand counts, and in both terms what the
    scheduler sent there and no report shows yet. May be negative; in decode steps.

    B counts what was charged because reports are up to an interval old: without it, an instance whose last report
    came just before its batch ended looks worse by the whole size of that batch, and a burst goes past it."""
    virtual_usage = report.used + report.reserved + report.queued_demand + report.headroom + charged_tokens
    return (report.capacity - virtual_usage) / max(report.running + charged_requests, 1)
