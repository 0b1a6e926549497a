"""The bus subjects. A name in a subject is one token: letters, digits, `-` and `_`."""

import re

PREFIX = "meshift.v1"

LOAD = f"{PREFIX}.load.*"
"""Subscribed: LoadReport of every worker, every report interval."""

INSTANCE_GONE = f"{PREFIX}.instance.gone"
"""InstanceGone, by the worker that leaves or whose engine died."""

LEASE = f"{PREFIX}.lease"
"""Lease of every frontend, in bulk."""

SCHEDULER = f"{PREFIX}.scheduler.report"
"""SchedulerReport: that a scheduler lives, and which."""

DISPATCH = f"{PREFIX}.scheduler.dispatch"
"""Endpoint: DispatchRequest -> DispatchReply."""

POLICY = f"{PREFIX}.scheduler.policy"
"""Endpoint: PolicyRequest -> PolicyReply."""

POLICY_KEPT = f"{PREFIX}.scheduler.policy-kept"
"""Published by frontends: KeptPolicy."""

DECISIONS = f"{PREFIX}.scheduler.decisions"
"""Endpoint: DecisionsRequest -> DecisionsReply."""

RECONFIGURE = f"{PREFIX}.coordinator.reconfigure"
"""Endpoint: ReconfigureOrder -> ReconfigureReport."""

RECONFIGURE_CANCEL = f"{PREFIX}.coordinator.cancel"
"""Endpoint: ReconfigureCancel -> ReconfigureReport."""

RECONFIGURATIONS = f"{PREFIX}.coordinator.reconfigurations"
"""Endpoint: ReconfigurationsRequest -> ReconfigurationsReply."""

LAUNCHER = f"{PREFIX}.launcher.report"
"""LauncherReport of every launcher."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def check_name(name: str) -> str:
    """Return `name` if it can stand in a subject; raise ValueError if not."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"name {name!r} must be 1 to 64 letters, digits, '-' or '_'")
    return name


def worker_load(instance_id: str) -> str:
    """Published by the worker: LoadReport. It listens there too, for a newer incarnation of itself."""
    return f"{PREFIX}.load.{instance_id}"


def worker_submit(instance_id: str) -> str:
    """Endpoint: Submit -> SubmitReply."""
    return f"{PREFIX}.worker.{instance_id}.submit"


def worker_replay(instance_id: str) -> str:
    """Endpoint: ReplayRequest -> ReplayReply."""
    return f"{PREFIX}.worker.{instance_id}.replay"


def worker_status(instance_id: str) -> str:
    """Endpoint: StatusRequest -> WorkerStatus."""
    return f"{PREFIX}.worker.{instance_id}.status"


def worker_drain(instance_id: str) -> str:
    """Endpoint: DrainRequest -> DrainReply."""
    return f"{PREFIX}.worker.{instance_id}.drain"


def worker_memory(instance_id: str) -> str:
    """Endpoint: MemoryRequest -> MemoryReply."""
    return f"{PREFIX}.worker.{instance_id}.memory"


def worker_layout(instance_id: str) -> str:
    """Endpoint: LayoutAsk -> LayoutReply."""
    return f"{PREFIX}.worker.{instance_id}.layout"


def worker_layout_step(instance_id: str) -> str:
    """Endpoint: LayoutOrder -> LayoutReply, when the step is done."""
    return f"{PREFIX}.worker.{instance_id}.layout-step"


def worker_pair(instance_id: str) -> str:
    """Published by the scheduler: MovePair, to the source."""
    return f"{PREFIX}.worker.{instance_id}.pair"


def worker_move(instance_id: str) -> str:
    """Endpoint: MoveOrder -> MoveReport, when the move has ended."""
    return f"{PREFIX}.worker.{instance_id}.move"


def worker_moves(instance_id: str) -> str:
    """Endpoint: MovesRequest -> MovesReply."""
    return f"{PREFIX}.worker.{instance_id}.moves"


def worker_move_reserve(instance_id: str) -> str:
    """Endpoint: MoveReserve -> MoveReserveReply."""
    return f"{PREFIX}.worker.{instance_id}.move-reserve"


def worker_move_commit(instance_id: str) -> str:
    """Endpoint: MoveCommit -> MoveCommitReply."""
    return f"{PREFIX}.worker.{instance_id}.move-commit"


def worker_move_question(instance_id: str) -> str:
    """Endpoint: MoveQuestion -> MoveAnswer."""
    return f"{PREFIX}.worker.{instance_id}.move-question"


def worker_move_abort(instance_id: str) -> str:
    """Published: MoveAbort."""
    return f"{PREFIX}.worker.{instance_id}.move-abort"


def worker_move_closed(instance_id: str) -> str:
    """Published: MoveClosed."""
    return f"{PREFIX}.worker.{instance_id}.move-closed"


def worker_cancel(instance_id: str) -> str:
    """Published: Cancel."""
    return f"{PREFIX}.worker.{instance_id}.cancel"


def worker_acknowledge(instance_id: str) -> str:
    """Published: Acknowledge."""
    return f"{PREFIX}.worker.{instance_id}.ack"


def launcher_launch(launcher_id: str) -> str:
    """Endpoint: LaunchRequest -> LaunchReply."""
    return f"{PREFIX}.launcher.{launcher_id}.launch"


def launcher_release(launcher_id: str) -> str:
    """Endpoint: ReleaseRequest -> LaunchReply."""
    return f"{PREFIX}.launcher.{launcher_id}.release"


def frontend_fence(frontend_id: str) -> str:
    """Endpoint: Fence -> FenceReply."""
    return f"{PREFIX}.frontend.{frontend_id}.fence"


def frontend_requests(frontend_id: str) -> str:
    """Endpoint: RequestsRequest -> RequestsReply."""
    return f"{PREFIX}.frontend.{frontend_id}.requests"


def frontend_tokens(frontend_id: str) -> str:
    """Published by workers: TokenBatch."""
    return f"{PREFIX}.frontend.{frontend_id}.tokens"
