"""What a worker reports of its engine."""

from meshift.backends.base import EngineInfo, EngineLoad
from meshift.schemas.base import trusted
from meshift.schemas.identity import Owner
from meshift.schemas.instances import InstanceState, LoadReport, ModelInfo, WorkerStatus
from meshift.services.worker.layouts.worker_layouts import WorkerLayouts
from meshift.services.worker.moves.worker_moves import WorkerMoves
from meshift.services.worker.policy.virtual_usage import VirtualUsageSettings, class_loads
from meshift.services.worker.requests import RequestTable


def load_report(
    owner: Owner,
    state: InstanceState,
    model: ModelInfo,
    load: EngineLoad,
    *,
    sequence: int,
    emitted_ns: int,
    usage: VirtualUsageSettings,
    layouts: WorkerLayouts | None = None,
) -> LoadReport:
    """The message."""
    classes, headroom = class_loads(load.usages, load.capacity, usage)
    return trusted(
        LoadReport,
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
        layout_epoch=0 if layouts is None else layouts.epoch,
        layers=() if layouts is None else layouts.layers,
        layout_change="" if layouts is None else layouts.change_id,
        step_count=load.step_count,
        prefill_tokens=load.prefill_tokens,
        batch_full=load.batch_full,
    )


def worker_status(
    load: LoadReport, info: EngineInfo, requests: RequestTable, moves: WorkerMoves, drain_left_s: float | None
) -> WorkerStatus:
    """The message. `drain_left_s`: until its drain's deadline; None: it doesn't drain."""
    running = requests.running()
    return WorkerStatus(
        load=load,
        engine=info.name,
        ranks=info.rank_pids,
        requests=running,
        unacknowledged=len(requests.unacknowledged()),
        moves_out=moves.running(),
        moves_in=moves.incoming(),
        drain=None if drain_left_s is None else moves.draining.status(running, drain_left_s),
    )
