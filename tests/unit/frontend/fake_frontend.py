"""A frontend core that plays scripts: what the HTTP shell is tested against."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import JsonValue

from meshift.schemas.admin import (
    DrainBody,
    InstanceList,
    InstanceStatus,
    MoveBody,
    MoveList,
    OpenRequest,
    RequestList,
)
from meshift.schemas.errors import MeshError, NotFound
from meshift.schemas.identity import Owner
from meshift.schemas.instances import DrainReply, InstanceState, LoadReport, ModelInfo, PolicyStamp
from meshift.schemas.memory import MemoryBody, MemoryReply, MemoryUnits
from meshift.schemas.moves import MoveFigures, MoveMode, MoveOutcome, MoveReport, MovesReply
from meshift.schemas.reconfiguring import (
    ReconfigurationsReply,
    ReconfigureBody,
    ReconfigureOutcome,
    ReconfigureReport,
)
from meshift.schemas.requests import Finish, FinishReason, TokenLogprob
from meshift.schemas.steering import (
    Changes,
    Decision,
    DecisionAlternative,
    DecisionsReply,
    DecisionsRequest,
    DecisionSubject,
    PolicyReply,
    RequestExplanation,
)
from meshift.services.frontend.api import Chunk, GenerateRequest
from meshift.services.scheduler.policy.settings import PolicySettings


@dataclass(frozen=True, slots=True)
class Emit:
    """Some tokens arrive, perhaps with the finish."""

    tokens: Sequence[int]
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class Raw:
    """A chunk as it is, right or wrong."""

    chunk: Chunk


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing arrives until the event is set."""

    event: asyncio.Event


@dataclass(frozen=True, slots=True)
class Fail:
    """The stream breaks."""

    error: BaseException


Step = Emit | Raw | Wait | Fail

STOPPED = Finish(reason=FinishReason.STOP)


def logprob_of(token: int, top: int) -> TokenLogprob:
    """Made up from the token: it is the likeliest of `top`, the next ids follow."""
    value = -(token % 7 + 1) / 8
    return TokenLogprob(value, tuple((token + place, value - place) for place in range(top)))


def logprobs_of(tokens: Sequence[int], top: int | None) -> Sequence[TokenLogprob] | None:
    """Those of a chunk, if they were asked for."""
    return None if top is None else [logprob_of(token, top) for token in tokens]


@dataclass
class Script:
    """How one request goes."""

    steps: Sequence[Step] = ()
    refuse: BaseException | None = None
    """`generate` raises it."""
    accept: asyncio.Event | None = None
    """`generate` waits for it."""
    delay: int = 0
    """`generate` takes that many turns of the event loop."""
    cancel_error: MeshError | None = None
    """`cancel` raises it."""
    cancel_hangs: bool = False


class FakeStream:
    """Plays one script. `cancels` counts."""

    def __init__(self, request: GenerateRequest, script: Script) -> None:
        self.request = request
        self.script = script
        self.cancels = 0
        self.cancelled = asyncio.Event()
        self.emitted = 0

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        for step in self.script.steps:
            await asyncio.sleep(0)
            match step:
                case Wait(event):
                    await event.wait()
                case Fail(error):
                    raise error
                case Raw(chunk):
                    yield chunk
                case Emit(tokens, finish):
                    start, self.emitted = self.emitted, self.emitted + len(tokens)
                    yield Chunk(start, tokens, finish, logprobs_of(tokens, self.request.sampling.logprobs))

    async def cancel(self) -> None:
        self.cancels += 1
        self.cancelled.set()
        if self.script.cancel_hangs:
            await asyncio.Event().wait()
        if self.script.cancel_error is not None:
            raise self.script.cancel_error


def model_info(name: str = "tiny", **changes: object) -> ModelInfo:
    """A model of the fake."""
    values: dict[str, object] = {
        "name": name,
        "path": "",
        "context_tokens_max": 512,
        "vocabulary_size": 100_000,
        "layers": 2,
    }
    return ModelInfo.model_validate({**values, **changes})


def load_report(model: ModelInfo, instance_id: str = "worker-1") -> LoadReport:
    """A report of an idle instance."""
    return LoadReport(
        owner=Owner(instance_id=instance_id, incarnation=1),
        sequence=1,
        emitted_ns=0,
        state=InstanceState.READY,
        model=model,
        capacity=1000,
        used=0,
        cached=0,
        free=1000,
        reserved=0,
        running=0,
        waiting=0,
        head_demand=0,
        queued_demand=0,
    )


DECISION = Decision(
    sequence=3,
    age_s=1.5,
    subject=DecisionSubject.DISPATCH,
    model="tiny",
    request_id="chatcmpl-1",
    attempt=1,
    decision="worker-1#1",
    why="freest",
    inputs={"demand": 5},
    alternatives=(
        DecisionAlternative(name="worker-1#1", figures={"freeness": 7.0}, rejected=""),
        DecisionAlternative(name="worker-2#1", figures={"freeness": None}, rejected="it drains"),
    ),
)


@dataclass
class FakeSteering:
    """A scheduler with settings and one decision."""

    settings: PolicySettings = field(default_factory=PolicySettings)
    changes: dict[str, JsonValue] = field(default_factory=dict)
    asked: list[DecisionsRequest] = field(default_factory=list)
    error: MeshError | None = None

    async def policy(self) -> PolicyReply:
        if self.error is not None:
            raise self.error
        return PolicyReply(
            scheduler_id="scheduler",
            incarnation=4,
            stamp=PolicyStamp(4, self.settings.version),
            settings=self.settings.model_dump(mode="json"),
            changes=self.changes,
        )

    async def change_policy(self, changes: Changes) -> PolicyReply:
        if changes:
            self.settings = self.settings.replaced(changes)
            self.changes = dict(changes)
        return await self.policy()

    async def decisions(self, request: DecisionsRequest) -> DecisionsReply:
        if self.error is not None:
            raise self.error
        self.asked.append(request)
        return DecisionsReply(
            scheduler_id="scheduler", incarnation=4, decisions=(DECISION,), decided=3, remembered=1, current=(DECISION,)
        )

    async def explain(self, request_id: str) -> RequestExplanation:
        if request_id != DECISION.request_id:
            raise NotFound(f"nothing is known of request {request_id!r}, or no more", param="request_id")
        return RequestExplanation(request_id=request_id, owner="worker-1#1", dispatches=(DECISION,))


def move_report(**changes: object) -> MoveReport:
    """Of a move that came about."""
    fields: dict[str, object] = {
        "request_id": "chatcmpl-1",
        "attempt": 1,
        "hop": 1,
        "source": Owner("worker-1", 1),
        "destination": Owner("worker-2", 1),
        "mode": MoveMode.LIVE,
        "phase": "moved",
        "outcome": MoveOutcome.MOVED,
        "figures": MoveFigures(rounds=2, tokens=70, byte_count=7_000_000, frozen_ns=12_000_000, duration_ns=50_000_000),
    }
    return MoveReport.model_validate(fields | changes)


@dataclass
class FakeOperators:
    """`Operators`, scripted: what is set here is answered."""

    open: list[OpenRequest] = field(default_factory=list)
    known: list[InstanceStatus] = field(
        default_factory=lambda: [InstanceStatus(load=load_report(model_info()), answers=True)]
    )
    told: list[MovesReply] = field(default_factory=list)
    report: MoveReport = field(default_factory=move_report)
    drained: list[tuple[str, DrainBody]] = field(default_factory=list)
    moved: list[tuple[str, MoveBody]] = field(default_factory=list)
    resized: list[tuple[str, MemoryBody]] = field(default_factory=list)
    error: MeshError | None = None
    """What drains, moves and other capacities are refused with."""

    async def instances(self) -> InstanceList:
        return InstanceList(data=tuple(self.known))

    async def requests(self) -> RequestList:
        return RequestList(data=tuple(self.open), total=len(self.open), unanswered=("frontend-9",))

    async def moves(self) -> MoveList:
        return MoveList(data=tuple(self.told), unanswered=("worker-9",))

    async def move(self, request_id: str, body: MoveBody) -> MoveReport:
        if self.error is not None:
            raise self.error
        self.moved.append((request_id, body))
        return self.report

    async def drain(self, instance_id: str, body: DrainBody) -> DrainReply:
        if self.error is not None:
            raise self.error
        self.drained.append((instance_id, body))
        return DrainReply(owner=Owner(instance_id=instance_id, incarnation=1), requests_left=3)

    async def memory(self, instance_id: str) -> MemoryReply:
        if not any(status.load.owner.instance_id == instance_id for status in self.known):
            raise NotFound("no such instance", param="instance_id")
        return memory_reply(instance_id, 1024)

    async def resize_memory(self, instance_id: str, body: MemoryBody) -> MemoryReply:
        if self.error is not None:
            raise self.error
        self.resized.append((instance_id, body))
        reply = memory_reply(instance_id, body.capacity)
        done = {"evicted": 32, "preempted": 1, "released_bytes": 3 << 20, "reason": "requests hold the rest"}
        return reply.model_copy(update=done)


def memory_reply(instance_id: str, capacity: int) -> MemoryReply:
    """Of 30 layers in eight groups of four; nothing used."""
    units = MemoryUnits(
        layers_per_group=4, groups=8, last_group_layers=2, page_tokens=16, unit_bytes=98304, unit_waste_bytes=0,
        last_unit_waste_bytes=49152, units=1032, committed=520, committed_bytes=520 * 98304, waste_bytes=65 * 49152,
    )  # fmt: skip
    return MemoryReply(
        owner=Owner(instance_id=instance_id, incarnation=1),
        capacity=capacity,
        used=0,
        cached=0,
        free=capacity,
        reserved=0,
        pages=capacity // 16,
        page_tokens=16,
        request_tokens_max=capacity - 4,
        resident_bytes=5 << 20,
        units=units,
    )


def reconfigure_report(outcome: ReconfigureOutcome | None = None, **changes: Any) -> ReconfigureReport:
    return ReconfigureReport(
        **(
            {
                "instance_id": "worker-1",
                "owner": Owner("worker-1", 1),
                "change_id": "coordinator-1-1",
                "phase": "converging" if outcome is None else outcome.value,
                "outcome": outcome,
            }
            | changes
        )
    )


@dataclass
class FakeReconfiguring:
    """`api.Reconfiguring`, scripted."""

    report: ReconfigureReport = field(default_factory=reconfigure_report)
    ended: list[ReconfigureReport] = field(default_factory=list)
    asked: list[tuple[str, ReconfigureBody]] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    error: MeshError | None = None

    async def reconfigure(self, instance_id: str, body: ReconfigureBody) -> ReconfigureReport:
        if self.error is not None:
            raise self.error
        self.asked.append((instance_id, body))
        return self.report

    async def cancel(self, instance_id: str) -> ReconfigureReport:
        if self.error is not None:
            raise self.error
        self.cancelled.append(instance_id)
        return self.report

    async def reconfigurations(self, instance_id: str | None = None) -> ReconfigurationsReply:
        if self.error is not None:
            raise self.error
        running = () if self.ended else (self.report,)
        return ReconfigurationsReply(
            coordinator_id="coordinator", incarnation=1, running=running, ended=tuple(self.ended)
        )


@dataclass
class FakeFrontend:
    """`Frontend`, scripted: `play(request)` says how a request goes."""

    model_list: list[ModelInfo] = field(default_factory=lambda: [model_info()])
    play: Callable[[GenerateRequest], Script] = lambda _request: Script([Emit((), STOPPED)])
    is_ready: bool = True
    has_scheduler: bool = True
    requests: list[GenerateRequest] = field(default_factory=list)
    streams: list[FakeStream] = field(default_factory=list)
    still_open: list[OpenRequest] = field(default_factory=list)
    drained: list[tuple[str, float]] = field(default_factory=list)
    resized: list[tuple[str, MemoryBody]] = field(default_factory=list)
    drain_error: MeshError | None = None
    steering: FakeSteering = field(default_factory=FakeSteering)
    operators: FakeOperators = field(default_factory=FakeOperators)
    reconfiguring: FakeReconfiguring = field(default_factory=FakeReconfiguring)
    abandoned: int = 0
    """Calls of `generate` that were cancelled."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def seen(self, *, requests: int = 0, streams: int = 0) -> None:
        """Wait until so many requests have come and streams have begun."""
        while len(self.requests) < requests or len(self.streams) < streams:
            self._changed.clear()
            await self._changed.wait()

    def models(self) -> list[ModelInfo]:
        return self.model_list

    def instances(self) -> list[LoadReport]:
        return [load_report(model, f"worker-{index}") for index, model in enumerate(self.model_list)]

    def ready(self) -> bool:
        return self.is_ready

    def scheduler_alive(self) -> bool:
        return self.has_scheduler

    async def generate(self, request: GenerateRequest) -> FakeStream:
        self.requests.append(request)
        self._changed.set()
        script = self.play(request)
        try:
            await _dispatch(script)
        except asyncio.CancelledError:
            self.abandoned += 1
            raise
        if script.refuse is not None:
            raise script.refuse
        stream = FakeStream(request, script)
        self.streams.append(stream)
        self._changed.set()
        return stream


async def _dispatch(script: Script) -> None:
    for _ in range(script.delay):
        await asyncio.sleep(0)
    if script.accept is not None:
        await script.accept.wait()
