"""One full example of each message: no field has its default where another value is possible."""

from array import array
from collections.abc import Iterator
from typing import Any

from meshift.schemas import (
    admin,
    errors,
    instances,
    launching,
    layouts,
    memory,
    moves,
    reconfiguring,
    requests,
    steering,
)
from meshift.schemas.base import Message, pack_tokens
from meshift.schemas.identity import FrontendRef, Owner, RequestKey

OWNER = Owner(instance_id="w1", incarnation=2)
OTHER = Owner(instance_id="w2", incarnation=5)
FRONTEND = FrontendRef(frontend_id="f1", incarnation=3)
KEY = RequestKey("r1", 2, 1)
PRIORITY = requests.Priority(scheduling=1, execution=2)
MODEL = instances.ModelInfo(name="m", path="/models/m", context_tokens_max=4096, vocabulary_size=32_000, layers=32)
SAMPLING = requests.Sampling(
    max_new_tokens=7, min_new_tokens=1, temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, frequency_penalty=-1.5,
    presence_penalty=1.5, repetition_penalty=1.1, stop=("\n\n", "END ü"), stop_token_ids=(2, 3), ignore_eos=True,
    seed=4, logprobs=2, json_schema="{}",
)  # fmt: skip
FINISH = requests.Finish(
    reason=requests.FinishReason.STOP, matched_stop="END ü", message="m", param="p", cached_tokens=5, preemptions=1,
    preemption_loss_ns=6,
)  # fmt: skip
TOKENS = pack_tokens([0, 1, -1, 2**31 - 1, -(2**31)])
LOGPROBS = requests.LogprobColumns(
    rows=(0,), tops=(1,), counts=(2,), values=array("d", [-0.5, -0.25, -1e-300, -3.4e38]).tobytes(),
    top_tokens=pack_tokens([7, 8]),
)  # fmt: skip
LOAD = instances.LoadReport(
    owner=OWNER, sequence=1, emitted_ns=2, state=instances.InstanceState.READY, model=MODEL, capacity=100, used=40,
    cached=30, free=20, reserved=10, running=3, waiting=4, head_demand=5, queued_demand=6, headroom=7, layout_epoch=8,
    classes=(instances.ClassLoad(name="high", execution=1, running=2, used=30, headroom=7),), step_count=9,
    prefill_tokens=8, batch_full=True, layers=(16, 14), layout_change="c1",
)  # fmt: skip
DRAIN = instances.DrainStatus(left=3, moving=1, moved=2, deadline_s=4.5, blocked="no room")
OPEN = admin.OpenRequest(
    request_id="r1", frontend=FRONTEND, model="m", state="running", attempt=2, hop=1, owner=OWNER, prompt_tokens=3,
    output_tokens=4, priority=PRIORITY,
)  # fmt: skip
LAYOUT = moves.MoveLayout(
    layer_ranges=((0, 4), (4, 6)), head_ranges=((0, 2),), head_dim=64, dtype="bfloat16", weights="abc"
)
ROOM = moves.MoveRoom(
    slots=48,
    cached=16,
    layout=LAYOUT,
    targets=(moves.MoveTarget(scheme="tcp", location="h:1", rank=1, token="t"),),
    epoch=3,
)
FIGURES = moves.MoveFigures(rounds=3, tokens=40, byte_count=50, gather_ns=6, transfer_ns=7, frozen_ns=8, duration_ns=9)
STAMP = instances.PolicyStamp(incarnation=3, version=2)
KEPT = steering.KeptPolicy(stamp=STAMP, changes={"migration": {"out_below": 5.5}})
DECISION = steering.Decision(
    sequence=4, age_s=1.5, subject=steering.DecisionSubject.DISPATCH, model="m", request_id="r1", attempt=2,
    decision="w1#2", why="freest", inputs={"demand": 3}, alternatives_left_out=1,
    alternatives=(steering.DecisionAlternative(name="w1#2", figures={"freeness": 1.5, "room": None}, rejected="full"),),
)  # fmt: skip
LAUNCHER = launching.LauncherReport(
    launcher_id="l", incarnation=1, sequence=2, model="m", instances_max=4, launches=3, failures=2, backoff_s=1.5,
    last_failure="died", start_s=7.5,
    instances=(
        launching.LaunchedInstance(instance_id="worker-2", state=launching.LaunchState.STARTING, state_s=0.5),
    ),
)  # fmt: skip
SPLIT = layouts.split_of((16, 14))
FLAGS = layouts.LayoutFlags(no_patch=True, no_async=True, no_resize=True, restart=True)
FACTS = layouts.LayoutFacts(
    split=SPLIT, epoch=3, layers_per_group=4, page_tokens=16, capacity=160, capacity_max=320, used=32,
    stages=(
        layouts.StageFacts(budget=9, reserve=1, layer_weights=2, block=3),
        layouts.StageFacts(budget=None, reserve=1, layer_weights=2, block=3),
    ),
)  # fmt: skip
PLAN = layouts.LayoutPlan(
    current=SPLIT, target=layouts.split_of((12, 18)), epoch=3, flags=FLAGS, added=((), (12, 13, 14, 15)),
    moved=(layouts.StageTransfer(source=0, destination=1, layers=(12, 16)),), deleted=((12, 13, 14, 15), ()), used=32,
    capacity=160, capacity_during=80, capacity_after=96, weights_bytes=8, kv_bytes=6,
    refusal=layouts.LayoutRefusal.NO_MEMORY, reason="r", nearest=((16, 14),), words=("a plan",),
)  # fmt: skip
ORDERS = reconfiguring.LayoutOrders(
    target=SPLIT, epoch=3, flags=FLAGS, commit=layouts.CommitMode.LAG, capacity_during=80, capacity_after=96,
    tau_tokens=7, bytes_per_s=1.5, deadline_s=2.5,
)  # fmt: skip
CHANGE = reconfiguring.ChangeStatus(
    change_id="c1", phase=reconfiguring.WorkerPhase.COPYING, orders=ORDERS, capacity_before=160, left_s=1.5,
    stages=(
        layouts.StageProgress(stage=1, layers=4, layers_loaded=2, lag_tokens=9, byte_count=8, rounds=2),
    ),
    scheduled_tokens=99, committed=layouts.CommitMode.LAG, stop_ns=(1, 2), last_patch_tokens=3, last_patch_bytes=4,
    moves_waited_ns=5, epoch=4, refusal=layouts.LayoutRefusal.BUSY, reason="r",
)  # fmt: skip
RECONFIGURE = reconfiguring.ReconfigureBody(
    layers=(12, 18), dry_run=True, commit=layouts.CommitMode.LAG, flags=FLAGS, tau_tokens=7, bytes_per_s=1.5,
    deadline_s=2.5, wait=True,
)  # fmt: skip
RECONFIGURATION = reconfiguring.ReconfigureReport(
    instance_id="w1", owner=OWNER, change_id="c1", phase="converging",
    outcome=reconfiguring.ReconfigureOutcome.COMMITTED, refusal=layouts.LayoutRefusal.BUSY, reason="r", plan=PLAN,
    change=CHANGE, epoch=4, duration_s=1.5, phases_s={"planning": 0.5}, lag_tokens=((0.5, 9),),
)  # fmt: skip
MOVE: dict[str, Any] = {"request_id": "r1", "attempt": 2, "hop": 1, "source": OWNER}
REPORT = moves.MoveReport(
    request_id="r1", attempt=2, hop=1, source=OWNER, destination=OTHER, mode=moves.MoveMode.BLOCKING, phase="copying",
    outcome=moves.MoveOutcome.STAYED, refusal=moves.MoveRefusal.NO_ROOM, reason="full", figures=FIGURES,
)  # fmt: skip

SAMPLES: tuple[Message, ...] = (
    errors.ErrorReply(code=errors.ErrorCode.STALE, message="old", param="hop"),
    LOAD,
    instances.InstanceGone(owner=OWNER, reason="drained"),
    instances.SchedulerReport(scheduler_id="s", incarnation=1, instances=2, policy=STAMP),
    KEPT,
    steering.PolicyRequest(changes={"a": {"b": 1}}, kept=KEPT),
    steering.PolicyReply(
        scheduler_id="s", incarnation=1, stamp=STAMP, settings={"policy": "llumnix", "a": {"b": None}}, changes={"a": 1}
    ),
    steering.DecisionsRequest(subject=steering.DecisionSubject.PAIR, request_id="r1", limit=7),
    steering.DecisionsReply(
        scheduler_id="s", incarnation=1, decisions=(DECISION,), decided=9, remembered=8, current=(DECISION,)
    ),
    LAUNCHER,
    launching.LaunchRequest(scheduler_id="s", incarnation=1, instances=2, timeout_s=3.5),
    launching.ReleaseRequest(scheduler_id="s", incarnation=1, owner=OWNER, deadline_s=2.5),
    launching.LaunchReply(instance_id="worker-2", report=LAUNCHER),
    instances.DispatchRequest(
        request_id="r1", attempt=2, frontend=FRONTEND, model="m", demand=3, priority=PRIORITY, excluded=(OWNER,),
        may_wait=True, waited_s=1.5,
    ),
    instances.DispatchReply(owner=OWNER, scheduler_id="s", incarnation=1, reason="freest", ask_again_s=0.25),
    instances.MovePair(
        scheduler_id="s", incarnation=1, source=OWNER, destination=OTHER, tokens_max=5, until_freeness=-1.5, ttl_s=0.5,
        headroom_max=9,
        waiting=True, reason="r",
    ),
    instances.DrainRequest(deadline_s=1.5, restart=True),
    instances.DrainReply(owner=OWNER, requests_left=2),
    memory.MemoryRequest(resize=memory.MemoryBody(capacity=5, preempt=True)),
    memory.MemoryReply(
        owner=OWNER, capacity=5, used=1, cached=1, free=2, reserved=1, pages=5, page_tokens=1, request_tokens_max=4,
        evicted=3, preempted=2, released_bytes=6, resident_bytes=7, reason="r",
        units=memory.MemoryUnits(
            layers_per_group=1, groups=2, last_group_layers=3, page_tokens=4, unit_bytes=5, unit_waste_bytes=6,
            last_unit_waste_bytes=7, units=8, committed=9, committed_bytes=10, waste_bytes=11,
        ),
    ),
    reconfiguring.LayoutAsk(owner=OWNER, change_id="c1"),
    reconfiguring.LayoutOrder(
        owner=OWNER, change_id="c1", step=reconfiguring.LayoutStep.BEGIN, orders=ORDERS, reason="r",
        refusal=layouts.LayoutRefusal.CANCELLED,
    ),
    reconfiguring.LayoutReply(
        owner=OWNER, facts=FACTS, change=CHANGE, refusal=layouts.LayoutRefusal.BUSY, reason="r"
    ),
    reconfiguring.ReconfigureOrder(instance_id="w1", body=RECONFIGURE),
    reconfiguring.ReconfigureCancel(instance_id="w1"),
    RECONFIGURATION,
    reconfiguring.ReconfigurationsRequest(instance_id="w1"),
    reconfiguring.ReconfigurationsReply(
        coordinator_id="c", incarnation=1, running=(RECONFIGURATION,), ended=(RECONFIGURATION,)
    ),
    instances.StatusRequest(),
    instances.WorkerStatus(
        load=LOAD, engine="sim", ranks=(1, 2), requests=3, unacknowledged=4, drain=DRAIN,
        moves_out=2, moves_in=5,
    ),
    admin.RequestsRequest(request_id="r1"),
    admin.RequestsReply(requests=(OPEN,), total=2),
    requests.Submit(
        request_id="r1", attempt=2, hop=1, owner=OWNER, frontend=FRONTEND, prompt=TOKENS, output=pack_tokens([5]),
        sampling=SAMPLING, priority=PRIORITY,
    ),
    requests.SubmitReply(owner=OWNER),
    requests.TokenBatch(
        owner=OWNER, emitted_ns=1, request_ids=("r1", "r2"), attempts=(1, 2), hops=(0, 1), starts=(0, 9), counts=(2, 3),
        tokens=TOKENS, finishes=(requests.TokenFinish(row=1, finish=FINISH),), logprobs=LOGPROBS,
    ),
    requests.Cancel(frontend=FRONTEND, owner=OWNER, keys=(KEY,), stale=True),
    requests.Acknowledge(frontend=FRONTEND, owner=OWNER, keys=(KEY, KEY)),
    requests.Lease(frontend=FRONTEND, ttl_s=1.5),
    requests.ReplayRequest(request_id="r1", attempt=2, hop=1, owner=OWNER, start=3),
    requests.ReplayReply(
        owner=OWNER, state=requests.ReplayState.FINISHED, start=3, tokens=TOKENS, logprobs=LOGPROBS, finish=FINISH,
        moved_to=OTHER, hop=2,
    ),
    moves.MoveOrder(
        owner=OWNER, request_id="r1", destination=OTHER, mode=moves.MoveMode.RECOMPUTE, deadline_s=1.5,
        wait=False,
    ),
    REPORT,
    moves.MovesRequest(),
    moves.MovesReply(owner=OWNER, running=(REPORT,), ended=(REPORT,), incoming=2),
    moves.MoveReserve(
        **MOVE, owner=OTHER, layout=LAYOUT, tokens=TOKENS, slots=48, epoch=3, json_schema='{"type": "object"}',
        deadline_s=1.5,
    ),
    moves.MoveReserveReply(owner=OTHER, room=ROOM, refusal=None, reason="r"),
    moves.MoveCommit(
        **MOVE, owner=OTHER, frontend=FRONTEND, lease_s=1.5, prompt=TOKENS, output=TOKENS, base=1, logprobs=LOGPROBS,
        sampling=SAMPLING, priority=PRIORITY, computed=9, state=b"s", kv_hashes=(1, 2**63), timeout_s=2.5, epoch=3,
    ),
    moves.MoveCommitReply(owner=OTHER, refusal=None, reason="r", runnable_ns=5),
    moves.MoveQuestion(**MOVE, owner=OTHER),
    moves.MoveAnswer(owner=OTHER, committed=True, runnable_ns=5),
    moves.MoveAbort(**MOVE, owner=OTHER, reason="r"),
    moves.MoveClosed(owner=OWNER, destination=OTHER, keys=(KEY,)),
    moves.Fence(**MOVE, frontend=FRONTEND, destination=OTHER),
    moves.FenceReply(frontend=FRONTEND, verdict=moves.FenceVerdict.RAISED, attempt=3),
)  # fmt: skip


def message_types(base: type[Message] = Message) -> Iterator[type[Message]]:
    """All kinds of messages that have been defined so far."""
    for message_type in base.__subclasses__():
        yield message_type
        yield from message_types(message_type)
