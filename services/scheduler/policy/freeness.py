"""Freeness: the decode steps that an instance's batch can still take (Llumnix, section 4.4.2): `F = (M - V) / B`.

V is the sum of virtual usages, which the worker computes (`meshift.services.worker.policy.virtual_usage`); here the
parts are put together for each purpose. Any of these may be negative; an instance that drains has minus infinity.
"""

from meshift.schemas.instances import InstanceState
from meshift.services.scheduler.policy.observation import InstanceObservation

DRAINING = float("-inf")


def dispatch_freeness(instance: InstanceObservation, headroom: bool = True) -> float:
    """For dispatching: all queued demand counts, and in both terms what the scheduler sent there and no report shows.

    B counts what was charged because reports are up to an interval old: without it, an instance whose last report
    came just before its batch ended looks worse by the whole size of that batch, and a burst goes past it."""
    report = instance.report
    usage = report.used + report.reserved + report.queued_demand + instance.charged_tokens + instance.moving_in
    if headroom:
        usage += instance.headroom
    return (report.capacity - usage) / max(report.running + instance.charged_requests, 1)


def migration_freeness(instance: InstanceObservation, headroom: bool = True, inflate_over_s: float = 0.0) -> float:
    """For migration: of the queue only the head's demand counts, so that room is made for one request at a time."""
    report = instance.report
    if report.state is InstanceState.DRAINING:
        return DRAINING
    usage = report.used + report.reserved + instance.inflation(inflate_over_s) + instance.moving_in
    if headroom:
        usage += report.headroom
    return (report.capacity - usage) / (report.running or 1)


def memory_load(instance: InstanceObservation) -> int:
    """INFaaS++: tokens in use, promised, queued and on their way."""
    report = instance.report
    return report.used + report.reserved + report.queued_demand + instance.charged_tokens
