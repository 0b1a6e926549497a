"""The frontend core: dispatches, submits, keeps streams exactly once, resumes them elsewhere after a crash."""

import asyncio
import logging
from collections.abc import Coroutine, Sequence

from pydantic import BaseModel, Field

from meshift.schemas import subjects
from meshift.schemas.base import unpack_tokens
from meshift.schemas.errors import InvalidRequest, MeshError, Overloaded, PeerGone, Stale
from meshift.schemas.identity import FrontendRef, Owner, RequestKey
from meshift.schemas.instances import (
    InstanceGone,
    LoadReport,
    ModelInfo,
    SchedulerReport,
    StatusRequest,
    WorkerStatus,
)
from meshift.schemas.logprobs import Logprobs, unpack_logprobs
from meshift.schemas.moves import Fence, FenceReply, FenceVerdict
from meshift.schemas.requests import Finish, Lease, ReplayReply, TokenBatch
from meshift.services.bus.base import Bus, ServiceInfo
from meshift.services.frontend import traces
from meshift.services.frontend.answers import Answers
from meshift.services.frontend.api import GenerateRequest
from meshift.services.frontend.asks import Asks
from meshift.services.frontend.counters import FrontendCounters
from meshift.services.frontend.dispatch import Dispatcher
from meshift.services.frontend.handle import StreamHandle
from meshift.services.frontend.operators import Operators
from meshift.services.frontend.placement import Placement
from meshift.services.frontend.reconfiguring import Reconfiguring
from meshift.services.frontend.steering import Steering
from meshift.services.frontend.streams import Stream, StreamEvent, StreamState, Verdict
from meshift.services.instances import InstanceView
from meshift.services.periodic import Periodic
from meshift.tracing.spans import NO_TRACER, Tracer

logger = logging.getLogger(__name__)


class FrontendOptions(BaseModel):
    """Timing and bounds of a frontend."""

    tick_s: float = Field(0.1, gt=0, description="how often silence is looked for")
    silence_s: float = Field(0.5, gt=0, description="silence of a stream after which its owner is asked")
    ask_timeout_s: float = Field(1.0, gt=0, description="deadline of that question")
    probe_after_s: float = Field(
        0.3, gt=0, description="silence of an instance after which it is asked whether it is there"
    )
    instance_timeout_s: float = Field(2.0, gt=0, description="silence after which an instance is taken for lost")
    dispatch_timeout_s: float = Field(0.5, gt=0, description="deadline of a dispatch; then bypass mode")
    submit_timeout_s: float = Field(2.0, gt=0, description="deadline of a submission; then another owner")
    memory_timeout_s: float = Field(60.0, gt=0, description="deadline of a change of KV memory")
    place_deadline_s: float = Field(5.0, gt=0, description="time to find an owner for a new request")
    resume_deadline_s: float = Field(120.0, gt=0, description="time to find a new owner for a stream that lost its own")
    retry_s: float = Field(0.1, gt=0, description="pause before all owners are tried again")
    lease_interval_s: float = Field(1.0, gt=0, description="how often the lease is renewed")
    lease_ttl_s: float = Field(5.0, gt=0, description="how long workers go on without a renewal")
    streams_max: int = Field(16_384, gt=0, description="streams at once; more are refused")


class FrontendCore:
    """One frontend on a bus; implements `api.Frontend`."""

    def __init__(self, ref: FrontendRef, bus: Bus, options: FrontendOptions, *, tracer: Tracer = NO_TRACER) -> None:
        subjects.check_name(ref.frontend_id)
        self._loop = asyncio.get_running_loop()
        self.ref = ref
        self.counters = FrontendCounters()
        self._tracer = tracer
        self._bus = bus
        self._options = options
        self._view = InstanceView(options.instance_timeout_s)
        self._streams: dict[str, Stream] = {}
        self._handles: dict[str, StreamHandle] = {}
        self._dispatcher = Dispatcher(bus, ref, self._view, options.dispatch_timeout_s, self.counters)
        self._answers = Answers(bus, ref)
        self._asks = Asks(bus, self, self._view, options, self.counters)
        self._operators = Operators(bus, ref, self._view, self._streams, options)
        self.reconfiguring = Reconfiguring(bus, options)
        self.steering = Steering(bus, self._view, self._streams, options.ask_timeout_s)
        self._placement = Placement(bus, ref, self._dispatcher, self._answers, options)
        self._probed: set[Owner] = set()
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._ticks = Periodic(options.tick_s, self._tick)
        self._leases = Periodic(options.lease_interval_s, self._renew_lease)

    # ---- life

    async def start(self) -> None:
        """Join the bus."""
        bus = self._bus
        bus.subscribe(subjects.LOAD, LoadReport, self._on_report)
        bus.subscribe(subjects.INSTANCE_GONE, InstanceGone, self._on_gone)
        bus.subscribe(subjects.SCHEDULER, SchedulerReport, self._on_scheduler)
        bus.subscribe(subjects.frontend_tokens(self.ref.frontend_id), TokenBatch, self._on_tokens)
        bus.serve("fence", subjects.frontend_fence(self.ref.frontend_id), Fence, self._on_fence)
        self._operators.serve()
        await bus.start(ServiceInfo("frontend", self.ref.frontend_id, "REST frontend: the stable end of streams"))
        self._renew_lease()
        self._ticks.start()
        self._leases.start()

    async def stop(self) -> None:
        """Cancel what runs and leave the bus. Idempotent."""
        self._ticks.stop()
        self._leases.stop()
        for task in list(self._tasks):
            task.cancel()
        for stream in list(self._streams.values()):
            self.cancel(stream)
        await self._bus.close()

    # ---- api.Frontend

    def models(self) -> list[ModelInfo]:
        """Models of the live instances, by name."""
        by_name = {known.report.model.name: known.report.model for known in self._view}
        return [by_name[name] for name in sorted(by_name)]

    def instances(self) -> list[LoadReport]:
        """The newest reports of the live instances."""
        return [known.report for known in self._view]

    @property
    def operators(self) -> Operators:
        """What operators ask of the mesh."""
        return self._operators

    def ready(self) -> bool:
        """Whether some live instance takes requests."""
        return any(known.takes_requests for known in self._view)

    def scheduler_alive(self) -> bool:
        """False: bypass mode."""
        return self._dispatcher.scheduler_alive

    async def generate(self, request: GenerateRequest) -> StreamHandle:
        """See `api.Frontend.generate`."""
        if len(self._streams) >= self._options.streams_max:
            raise Overloaded(f"{len(self._streams)} streams are open already")
        if not len(request.prompt):
            raise InvalidRequest("the prompt is empty", param="prompt")
        if request.request_id in self._streams:
            raise InvalidRequest(f"request {request.request_id} is open already", param="request_id")
        stream = Stream(request, self.now_s())
        stream.trace = traces.begin(self._tracer, request)
        handle = StreamHandle(stream, self.cancel)
        self._streams[request.request_id] = stream
        self._handles[request.request_id] = handle
        try:
            with stream.trace.current():
                await self._placement.place_new(stream)
        except BaseException as error:
            stream.trace.failed(error)
            self.cancel(stream)
            raise
        return handle

    def cancel(self, stream: Stream) -> None:
        """Stop a stream, wherever it is. Idempotent."""
        if stream.ended:
            return
        stream.enter(StreamEvent.CANCEL)
        if stream.owner is not None:
            self._answers.cancel(stream.owner, stream.key)
        self._settle(stream)

    def open_streams(self) -> int:
        """Streams that haven't ended."""
        return len(self._streams)

    # ---- what workers say

    def _on_tokens(self, batch: TokenBatch) -> None:
        now_s = self.now_s()
        owner, streams = batch.owner, self._streams
        tokens = unpack_tokens(batch.tokens)
        finishes = {item.row: item.finish for item in batch.finishes}
        logprobs = None if batch.logprobs is None else unpack_logprobs(batch.logprobs)
        offset = 0
        columns = zip(batch.request_ids, batch.attempts, batch.hops, batch.starts, batch.counts, strict=True)
        for row, (request_id, attempt, hop, start, count) in enumerate(columns):
            finish = finishes.get(row)
            stream = streams.get(request_id)
            part = tokens[offset : offset + count]
            given = None if logprobs is None else logprobs.get(row)
            offset += count
            verdict = Verdict.STALE if stream is None else stream.judge(attempt, hop, owner)
            if stream is None or verdict is Verdict.STALE:
                self._stale(owner, RequestKey(request_id, attempt, hop), finish is not None)
            elif verdict is Verdict.FORMER:
                self._take_former(stream, start, part, given)
            else:
                if verdict is Verdict.NEWER_HOP:
                    stream.adopt(hop, owner, start, now_s)
                self._take(stream, start, part, finish, now_s, given)
        self._answers.flush()

    def _take(
        self,
        stream: Stream,
        start: int,
        tokens: Sequence[int],
        finish: Finish | None,
        now_s: float,
        logprobs: Logprobs | None = None,
    ) -> None:
        if stream.take(start, tokens, finish, now_s, logprobs):
            self.counters.grown(stream, now_s)
            self._grown(stream)
        elif stream.has_gap:
            self._asks.ask(stream)

    def _take_former(self, stream: Stream, start: int, tokens: Sequence[int], logprobs: Logprobs | None) -> None:
        if stream.take_former(start, tokens, logprobs):
            self.counters.grown(stream, self.now_s())
            self._grown(stream)

    def _stale(self, owner: Owner, key: RequestKey, finished: bool) -> None:
        """Its sender is told."""
        self.counters.stale_events += 1
        self._answers.stale(owner, key, finished)

    def _on_fence(self, fence: Fence) -> FenceReply:
        if fence.frontend != self.ref:
            raise Stale(f"this is {self.ref}, not {fence.frontend}")
        stream = self._streams.get(fence.request_id)
        verdict = FenceVerdict.GONE if stream is None else stream.fence(fence, self.now_s())
        logger.warning("%s asks who owns %s: %s", fence.source, fence.destination_key, verdict)
        return FenceReply(frontend=self.ref, verdict=verdict, attempt=0 if stream is None else stream.attempt)

    def _grown(self, stream: Stream) -> None:
        handle = self._handles[stream.request.request_id]
        if stream.ended and stream.owner is not None:
            self._answers.acknowledge(stream.owner, stream.key)
            self._settle(stream)
        handle.wake()

    def _settle(self, stream: Stream) -> None:
        """An ended stream is nobody's business any more."""
        if self._streams.pop(stream.request.request_id, None) is not None:
            self.counters.settled(stream, self.now_s())
            stream.trace.end(stream)
        handle = self._handles.pop(stream.request.request_id, None)
        if handle is not None:
            handle.wake()

    def _on_report(self, report: LoadReport) -> None:
        for lost in self._view.on_report(report, self.now_s()):
            self._owner_lost(lost, "superseded by a newer incarnation")

    def _on_gone(self, gone: InstanceGone) -> None:
        self._view.on_gone(gone.owner)
        self._owner_lost(gone.owner, gone.reason)

    def _on_scheduler(self, report: SchedulerReport) -> None:
        self._dispatcher.on_scheduler(report)
        if self.steering.is_behind(report):
            self.spawn(self.steering.catch_up())

    # ---- silence and loss

    def _tick(self) -> None:
        now_s = self.now_s()
        for owner in self._view.expire(now_s):
            self._owner_lost(owner, f"no report for {self._options.instance_timeout_s} s")
        silence_s = self._options.silence_s
        for stream in [stream for stream in self._streams.values() if now_s - stream.heard_s >= silence_s]:
            if stream.state is StreamState.RUNNING:
                self._asks.ask(stream)
        for owner in self._view.silent(now_s, self._options.probe_after_s):
            self._probe(owner)
        self._answers.repeat_cancels()

    def _renew_lease(self) -> None:
        self._bus.publish(subjects.LEASE, Lease(frontend=self.ref, ttl_s=self._options.lease_ttl_s))

    def _probe(self, owner: Owner) -> None:
        if owner not in self._probed:
            self._probed.add(owner)
            self.spawn(self._probe_owner(owner))

    async def _probe_owner(self, owner: Owner) -> None:
        """If nobody serves a silent owner's subject it is dead. No answer in time proves nothing: it may be busy."""
        subject = subjects.worker_status(owner.instance_id)
        try:
            await self._bus.request(subject, StatusRequest(), WorkerStatus, timeout_s=self._options.ask_timeout_s)
        except PeerGone:
            if self._view.forget(owner):
                self._owner_lost(owner, "nobody serves its subject")
        except MeshError as error:
            logger.debug("%s is silent, and asked: %s", owner, error)
        finally:
            self._probed.discard(owner)

    def _owner_lost(self, owner: Owner, why: str) -> None:
        for stream in list(self._streams.values()):
            if stream.owner == owner and stream.state is StreamState.RUNNING:
                self.resume(stream, why)

    def resume(self, stream: Stream, why: str) -> None:
        """AskingCore."""
        logger.warning("%s goes on elsewhere: %s: %s", stream.key, stream.owner, why)
        self.counters.resumes += 1
        stream.trace.owner_lost(stream.owner, why)
        stream.enter(StreamEvent.OWNER_LOST)
        if stream.owner is not None:
            self._answers.cancel(stream.owner, stream.key)
        self.spawn(self._place_again(stream), stream)

    async def _place_again(self, stream: Stream) -> None:
        try:
            with stream.trace.resume(stream.attempt, stream.owner):
                await self._placement.place_again(stream)
        except MeshError as error:
            if not stream.ended:
                stream.fail(error)
                self._settle(stream)

    def take_replay(self, stream: Stream, reply: ReplayReply, *, former: bool) -> None:
        """AskingCore."""
        logprobs = None if reply.logprobs is None else unpack_logprobs(reply.logprobs).get(0)
        tokens = unpack_tokens(reply.tokens)
        if former:
            self._take_former(stream, reply.start, tokens, logprobs)
        else:
            self._take(stream, reply.start, tokens, reply.finish, self.now_s(), logprobs)
        self._answers.flush()

    def spawn(self, work: Coroutine[None, None, None], stream: Stream | None = None) -> None:
        """AskingCore. Work for a stream belongs to its trace, not to that of whoever noticed that it is to be done."""
        context = stream.trace.context() if stream is not None else None
        task = asyncio.get_running_loop().create_task(work, context=context)
        self._tasks[task] = None
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a stream's task failed", exc_info=task.exception())

    def now_s(self) -> float:
        """AskingCore."""
        return self._loop.time()
