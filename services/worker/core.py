"""The worker service: one engine on the bus. Everything here runs on one event loop and none of it waits."""

import asyncio
import contextvars
import logging
from collections.abc import Sequence

from meshift.backends.base import (
    Engine,
    EngineFailure,
    EngineInfo,
    EngineLoad,
    EngineRequest,
    TokenEvent,
)
from meshift.schemas import subjects
from meshift.schemas.base import unpack_tokens
from meshift.schemas.errors import MeshError, Overloaded, OverloadError, Stale, Unavailable
from meshift.schemas.identity import Owner, RequestKey
from meshift.schemas.instances import (
    DrainReply,
    DrainRequest,
    InstanceGone,
    InstanceState,
    LoadReport,
    StatusRequest,
    WorkerStatus,
)
from meshift.schemas.logprobs import Logprobs, pack_logprobs
from meshift.schemas.requests import (
    Acknowledge,
    Cancel,
    Lease,
    ReplayReply,
    ReplayRequest,
    ReplayState,
    Submit,
    SubmitReply,
)
from meshift.services.bus.base import Bus, ServiceInfo, Subscription
from meshift.services.periodic import Periodic
from meshift.services.worker import traces
from meshift.services.worker.batches import BatchBuilder
from meshift.services.worker.counters import WorkerCounters
from meshift.services.worker.leases import Leases
from meshift.services.worker.lifecycle import LifecycleEvent, has_ended, next_state
from meshift.services.worker.options import WorkerOptions
from meshift.services.worker.policy.virtual_usage import class_loads
from meshift.services.worker.requests import RequestRecord, RequestTable
from meshift.services.worker.watchdog import StallWatch
from meshift.tracing.spans import NO_TRACER, Tracer

logger = logging.getLogger(__name__)


class WorkerCore:
    """One instance. `ended` is set to its last state when it serves no more."""

    def __init__(
        self, owner: Owner, engine: Engine, bus: Bus, options: WorkerOptions, *, tracer: Tracer = NO_TRACER
    ) -> None:
        subjects.check_name(owner.instance_id)
        self.owner = owner
        self.counters = WorkerCounters()
        self._tracer = tracer
        self.state = InstanceState.STARTING
        self.ended: asyncio.Future[InstanceState] = asyncio.get_running_loop().create_future()
        self._engine = engine
        self._info: EngineInfo | None = None
        self._bus = bus
        self._options = options
        self._requests = RequestTable(options.tombstone_s)
        self._leases = Leases()
        self._stall = StallWatch(options.engine_stall_s)
        self._sequence = 0
        self._drain_until_s = 0.0
        self._acknowledge_until_s: float | None = None
        self._reason = ""
        self._periodic = Periodic(options.report_interval_s, self._tick)
        self._subscriptions: list[Subscription] = []

    # ---- life

    async def start(self) -> None:
        """Join the bus, bring the engine up, serve. Raises `EngineStartError`, `PeerTimeout`."""
        name = self.owner.instance_id
        await self._bus.start(ServiceInfo("worker", name, "one instance of the engine"))
        self._info = await self._engine.start(self)
        self._enter(LifecycleEvent.ENGINE_READY)
        bus = self._bus
        self._subscriptions = [
            bus.subscribe(subjects.worker_load(name), LoadReport, self._on_own_load),
            bus.subscribe(subjects.worker_cancel(name), Cancel, self._on_cancel),
            bus.subscribe(subjects.worker_acknowledge(name), Acknowledge, self._on_acknowledge),
            bus.subscribe(subjects.LEASE, Lease, self._on_lease),
            bus.serve("submit", subjects.worker_submit(name), Submit, self._on_submit),
            bus.serve("replay", subjects.worker_replay(name), ReplayRequest, self._on_replay),
            bus.serve("status", subjects.worker_status(name), StatusRequest, self._on_status),
            bus.serve("drain", subjects.worker_drain(name), DrainRequest, self._on_drain),
        ]
        self._publish_load(self._engine.load())
        self._periodic.start()

    def drain(self, deadline_s: float) -> int:
        """Take no more requests; leave when the running ones have ended, or at the deadline (their frontends then
        go on elsewhere). Returns how many there are. Idempotent: a later call may only shorten the deadline."""
        if has_ended(self.state):
            return 0
        until_s = self._now_s() + deadline_s
        self._drain_until_s = min(self._drain_until_s, until_s) if self.state is InstanceState.DRAINING else until_s
        self._enter(LifecycleEvent.DRAIN)
        if self.state is InstanceState.DRAINING:
            self._publish_load(self._engine.load())
        return self._requests.running()

    async def stop(self) -> None:
        """Leave the bus and end the engine, now. Idempotent."""
        self._periodic.stop()
        for subscription in self._subscriptions:
            subscription.close()
        self._requests.abandon_traces("the worker was stopped")
        await self._engine.stop(self._options.stop_deadline_s)
        await self._bus.close()

    def _enter(self, event: LifecycleEvent) -> None:
        self.state = next_state(self.state, event)
        if has_ended(self.state):
            self._leave()

    def _leave(self) -> None:
        if self.ended.done():
            return
        self._periodic.stop()
        for subscription in self._subscriptions:
            subscription.close()
        self._requests.abandon_traces(self._reason or self.state)
        self._bus.publish(subjects.INSTANCE_GONE, InstanceGone(owner=self.owner, reason=self._reason or self.state))
        self.ended.set_result(self.state)

    def _fail(self, reason: str) -> None:
        if not has_ended(self.state):
            logger.error("instance %s failed: %s", self.owner, reason)
            self._reason = reason
            self._enter(LifecycleEvent.FAILED)

    def open_requests(self) -> int:
        """Requests that are kept here: running, or ended and not acknowledged."""
        return len(self._requests)

    def unacknowledged(self) -> int:
        """Requests that have ended and wait for their acknowledgement."""
        return len(self._requests.unacknowledged())

    def load(self) -> EngineLoad | None:
        """The engine's newest snapshot; None before it is up."""
        return self._engine.load() if self._info is not None else None

    # ---- what the engine says

    def on_step(self, events: Sequence[TokenEvent]) -> None:
        """EngineListener."""
        # An engine's timers may have been set while some request's context was the current one. A step belongs to
        # no request: what is sent of it carries no trace.
        contextvars.Context().run(self._on_step, events)

    def _on_step(self, events: Sequence[TokenEvent]) -> None:
        if has_ended(self.state):
            return
        builders: dict[str, BatchBuilder] = {}
        now_s = self._now_s()
        for event in events:
            record = self._requests.get(event.key)
            if record is not None and self._take(record, event, now_s):
                builder = builders.get(record.frontend.frontend_id)
                if builder is None:
                    builder = builders[record.frontend.frontend_id] = BatchBuilder()
                builder.add(record, event.start, event.tokens)
        self._publish_batches(builders, now_s)

    def on_failure(self, failure: EngineFailure) -> None:
        """EngineListener."""
        self._fail(failure.reason)

    def _take(self, record: RequestRecord, event: TokenEvent, now_s: float) -> bool:
        """Keep an event's tokens. Returns whether they are to be sent."""
        if event.start != record.end:
            raise AssertionError(f"{event.key}: engine gave tokens from {event.start}, expected {record.end}")
        record.output.extend(event.tokens)
        if record.logprobs is not None:
            self._take_logprobs(record, record.logprobs, event)
        record.finish = event.finish
        record.sent_s = now_s
        if event.finish is not None:
            self.counters.finished(event.finish)
        if record.trace is not None:
            record.trace.on_event(event)
        if record.muted and record.finish is not None:
            self._requests.engine_ended(record)
        return not record.muted

    @staticmethod
    def _take_logprobs(record: RequestRecord, known: Logprobs, event: TokenEvent) -> None:
        known.extend(event.logprobs or ())
        if len(known) != len(record.output):
            raise AssertionError(f"{event.key}: {len(known)} log-probabilities of {len(record.output)} tokens")

    def _publish_batches(self, builders: dict[str, BatchBuilder], now_s: float) -> None:
        emitted_ns = round(now_s * 1e9)
        for frontend_id, builder in builders.items():
            batch = builder.build(self.owner, emitted_ns)
            try:
                self._bus.publish(subjects.frontend_tokens(frontend_id), batch)
            except OverloadError as error:
                self.counters.batches_lost += 1
                # The outputs stay here: the frontend asks for them when it misses them.
                logger.warning("tokens for %s not sent: %s", frontend_id, error)

    # ---- what frontends say

    def _on_submit(self, submit: Submit) -> SubmitReply:
        try:
            if submit.owner != self.owner:
                raise Stale(f"this is {self.owner}, not {submit.owner}")
            if self._requests.check_new(submit):
                self._admit(submit)
        except MeshError as error:
            self.counters.submitted(error.code)
            raise
        self.counters.submitted("accepted")
        return SubmitReply(owner=self.owner)

    def _admit(self, submit: Submit) -> None:
        if self.state is not InstanceState.READY:
            raise Unavailable(f"{self.owner} is {self.state}")
        if len(self._requests) >= self._options.requests_max:
            raise Overloaded(f"{self.owner} holds {len(self._requests)} requests already")
        self._leases.renew(submit.frontend, self._options.lease_ttl_s, self._now_s())
        output = unpack_tokens(submit.output)
        trace = traces.begin(self._tracer, submit, self.owner, len(output))
        older = self._requests.add(submit, len(output), trace)
        if older is not None:
            self._engine.cancel(older.key)
        try:
            self._engine.submit(
                EngineRequest(submit.key, unpack_tokens(submit.prompt), output, submit.sampling, submit.priority)
            )
        except Exception as error:
            if trace is not None:
                trace.abandon(str(error))
            self._requests.discard(submit.key)
            raise

    def _on_replay(self, ask: ReplayRequest) -> ReplayReply:
        if ask.owner != self.owner:
            raise Stale(f"this is {self.owner}, not {ask.owner}")
        record = self._requests.get(ask.key)
        if record is None or record.muted:
            return ReplayReply(owner=self.owner, state=ReplayState.UNKNOWN)
        state = ReplayState.RUNNING if record.finish is None else ReplayState.FINISHED
        tokens, logprobs, finish = record.replay_from(ask.start)
        return ReplayReply(
            owner=self.owner,
            state=state,
            start=ask.start,
            tokens=tokens.tobytes(),
            logprobs=None if logprobs is None else pack_logprobs(logprobs),
            finish=finish,
        )

    def _on_cancel(self, cancel: Cancel) -> None:
        if cancel.owner == self.owner:
            for key in cancel.keys:
                self._close(key)

    def _on_acknowledge(self, acknowledge: Acknowledge) -> None:
        if acknowledge.owner == self.owner:
            for key in acknowledge.keys:
                self._close(key)

    def _close(self, key: RequestKey) -> None:
        running = self._requests.close(key, self._now_s())
        if running is not None:
            self._engine.cancel(running.key)

    def _on_lease(self, lease: Lease) -> None:
        self._leases.renew(lease.frontend, lease.ttl_s, self._now_s())

    # ---- what operators and other incarnations say

    def _on_drain(self, request: DrainRequest) -> DrainReply:
        return DrainReply(owner=self.owner, requests_left=self.drain(request.deadline_s))

    def _on_status(self, _: StatusRequest) -> WorkerStatus:
        info = self._engine_info()
        return WorkerStatus(
            load=self._load_report(self._engine.load()),
            engine=info.name,
            ranks=info.rank_pids,
            requests=self._requests.running(),
            unacknowledged=self.unacknowledged(),
        )

    def _on_own_load(self, report: LoadReport) -> None:
        if report.owner.incarnation > self.owner.incarnation and not has_ended(self.state):
            self._reason = f"superseded by {report.owner}"
            logger.warning("%s is %s", self.owner, self._reason)
            self._enter(LifecycleEvent.SUPERSEDED)

    # ---- every report interval

    def _tick(self) -> None:
        now_s = self._now_s()
        load = self._engine.load()
        if self._stall.is_stalled(load.step_count, bool(load.running or load.waiting), now_s):
            self._fail(f"no step for {self._options.engine_stall_s:.0f} s with {load.running} requests running")
            return
        self._end_leases(now_s)
        self._resend(now_s)
        self._requests.forget_tombstones(now_s)
        self._publish_load(load)
        if self.state is InstanceState.DRAINING:
            self._check_drained(now_s)

    def _end_leases(self, now_s: float) -> None:
        orphans = [record for record in self._requests if not self._leases.is_live(record.frontend, now_s)]
        for record in orphans:
            logger.warning("%s: lease of %s has ended", record.key, record.frontend)
            self.counters.leases_ended += 1
            self._close(record.key)
        self._leases.expire(now_s, self._options.tombstone_s)

    def _resend(self, now_s: float) -> None:
        builders: dict[str, BatchBuilder] = {}
        for record in self._requests.unacknowledged():
            if now_s - record.sent_s >= self._options.resend_s:
                record.sent_s = now_s
                self.counters.resent += 1
                builder = builders.setdefault(record.frontend.frontend_id, BatchBuilder())
                builder.add(record, record.end, ())
        self._publish_batches(builders, now_s)

    def _check_drained(self, now_s: float) -> None:
        running = self._requests.running()
        if running and now_s < self._drain_until_s:
            return
        if self._acknowledge_until_s is None:
            self._acknowledge_until_s = now_s + self._options.acknowledge_wait_s
        if self._requests.unacknowledged() and now_s < self._acknowledge_until_s:
            return
        self._reason = f"drained with {running} requests left" if running else "drained"
        self._enter(LifecycleEvent.DRAINED)

    def _publish_load(self, load: EngineLoad) -> None:
        self._sequence += 1
        self._bus.publish(subjects.worker_load(self.owner.instance_id), self._load_report(load))

    def _load_report(self, load: EngineLoad) -> LoadReport:
        classes, headroom = class_loads(load.usages, load.capacity, self._options.virtual_usage)
        return LoadReport(
            owner=self.owner,
            sequence=self._sequence,
            emitted_ns=round(self._now_s() * 1e9),
            state=self.state,
            model=self._engine_info().model,
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
        )

    def _engine_info(self) -> EngineInfo:
        if self._info is None:
            raise Unavailable(f"{self.owner} is {self.state}")
        return self._info

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()
