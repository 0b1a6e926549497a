"""What a worker reports of its engine."""

from meshift.backends.base import EngineLoad
from meshift.schemas.identity import Owner
from meshift.schemas.instances import InstanceState, LoadReport, ModelInfo
from meshift.services.worker.policy.virtual_usage import VirtualUsageSettings, class_loads


def load_report(
    owner: Owner,
    state: InstanceState,
    model: ModelInfo,
    load: EngineLoad,
    *,
    sequence: int,
    emitted_ns: int,
    usage: VirtualUsageSettings,
) -> LoadReport:
    """The message."""
    classes, headroom = class_loads(load.usages, load.capacity, usage)
    return LoadReport(
        owner=owner,
        sequence=sequence,
        emitted_ns=emitted_ns,
        state=state,
        model=model,
        capacity=load.capacity,
        used=load.used,
        cached=load.cached,
        free=load.free,
        reserved=load.reserved,
        running=load.running,
        waiting=load.waiting,
        head_demand=load.head_demand,
        queued_demand=load.queued_demand,
        headroom=headroom,
        classes=classes,
        step_count=load.step_count,
        prefill_tokens=load.prefill_tokens,
    )
