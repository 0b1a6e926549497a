"""The worker service: one engine on the bus. Everything here runs on one event loop and none of it waits."""

import asyncio
import logging
from collections.abc import Iterable, Sequence

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
from meshift.schemas.errors import MeshError, Overloaded, Stale, Unavailable
from meshift.schemas.identity import Owner, RequestKey
from meshift.schemas.instances import (
    DrainReply,
    DrainRequest,
    InstanceGone,
    InstanceState,
    LoadReport,
    MovePair,
    StatusRequest,
    WorkerStatus,
)
from meshift.schemas.memory import MemoryReply
from meshift.schemas.requests import (
    Acknowledge,
    Cancel,
    Lease,
    ReplayReply,
    ReplayRequest,
    Submit,
    SubmitReply,
)
from meshift.services.bus.base import Bus, ServiceInfo, Subscription
from meshift.services.periodic import Periodic
from meshift.services.worker import replays, traces
from meshift.services.worker.counters import WorkerCounters
from meshift.services.worker.drain import Drain
from meshift.services.worker.giver import Giver
from meshift.services.worker.layouts.gate import LayoutGate
from meshift.services.worker.layouts.worker_layouts import WorkerLayouts
from meshift.services.worker.leases import Leases
from meshift.services.worker.lifecycle import LifecycleEvent, has_ended, next_state
from meshift.services.worker.memory import KvMemory
from meshift.services.worker.moves.context import MoveContext
from meshift.services.worker.moves.destinations import MeshDestinations
from meshift.services.worker.moves.moved import Moved, MovedAway
from meshift.services.worker.moves.peers import Peers
from meshift.services.worker.moves.worker_moves import WorkerMoves
from meshift.services.worker.options import WorkerOptions
from meshift.services.worker.reports import load_report, worker_status
from meshift.services.worker.requests import RequestRecord, RequestTable
from meshift.services.worker.streams import Streams
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
        self.restart_wanted = False
        """An operator wants it to be started again when it has left."""
        loop = asyncio.get_running_loop()
        self._now_s = loop.time
        self.ended: asyncio.Future[InstanceState] = loop.create_future()
        self._engine = engine
        self._info: EngineInfo | None = None
        self._moves: WorkerMoves | None = None
        self._giver: Giver | None = None
        self._memory: KvMemory | None = None
        self._layouts: WorkerLayouts | None = None
        self._bus = bus
        self._options = options
        self._requests = RequestTable(options.tombstone_s)
        self._streams = Streams(owner, bus, self._requests, self.counters, options.resend_s)
        self._leases = Leases()
        self._gate = LayoutGate(None)
        self._stall = StallWatch(options.engine_stall_s)
        self._sequence = 0
        self._drain = Drain(options.acknowledge_wait_s)
        self._reason = ""
        self._periodic = Periodic(options.report_interval_s, self._tick)
        self._subscriptions: list[Subscription] = []

    # ---- life

    async def start(self) -> None:
        """Join the bus, bring the engine up, serve. Raises `EngineStartError`, `PeerTimeout`."""
        name = self.owner.instance_id
        await self._bus.start(ServiceInfo("worker", name, "one instance of the engine"))
        self._info = await self._engine.start(self)
        self._moves = self._build_moves(self._info)
        self._giver = Giver(self.owner, self._engine, self._moves, self._requests, self._options)
        self._memory = KvMemory(self.owner, self._engine, self._info, self._options.memory_interval_s)
        self._layouts = WorkerLayouts(
            self.owner, self._engine, self._info, self._gate, self._moves, self._options, entered=self._report
        )
        await self._layouts.start()
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
            self._memory.serve(bus),
            *self._layouts.serve(bus),
            *self._moves.serve(bus),
            bus.subscribe(subjects.worker_pair(name), MovePair, self._giver.on_pair),
        ]
        self._report()
        self._periodic.start()

    def _build_moves(self, info: EngineInfo) -> WorkerMoves:
        options, bus = self._options, self._bus
        self._gate.kv = info.layout
        return WorkerMoves(
            MoveContext(
                owner=self.owner,
                engine=self._engine,
                info=info,
                requests=self._requests,
                leases=self._leases,
                peers=Peers(bus, self.owner, options),
                destinations=MeshDestinations(bus, self.owner, info.model, options),
                options=options,
                tracer=self._tracer,
                close=self._close,
                announce=self._streams.announce,
                moved=MovedAway(options.moved_kept_s),
                gate=self._gate,
            )
        )

    @property
    def moves(self) -> WorkerMoves:
        """Of its requests. Raises Unavailable before the engine is up."""
        if self._moves is None:
            raise Unavailable(f"{self.owner} is {self.state}")
        return self._moves

    @property
    def layouts(self) -> WorkerLayouts:
        """Changes of its layout. Raises Unavailable before the engine is up."""
        if self._layouts is None:
            raise Unavailable(f"{self.owner} is {self.state}")
        return self._layouts

    @property
    def requests(self) -> Iterable[RequestRecord]:
        """All that are kept here: running, or ended and not acknowledged."""
        return self._requests

    def drain(self, deadline_s: float) -> int:
        """Take no more requests, move the running ones away, and wait for those that can't move; leave then, or at the
        deadline (frontends then go on elsewhere with what is left). Returns how many there are. Idempotent: a later
        call may only shorten the deadline."""
        if has_ended(self.state):
            return 0
        self._drain.begin(self._now_s() + deadline_s)
        self._enter(LifecycleEvent.DRAIN)
        if self.state is InstanceState.DRAINING:
            self.moves.refuse()
            self.layouts.refuse()
            self._report()
        return self._requests.running()

    async def stop(self) -> None:
        """Leave the bus and end the engine, now. Idempotent."""
        self._end_service("the worker was stopped")
        await self._engine.stop(self._options.stop_deadline_s)
        await self._bus.close()

    def _enter(self, event: LifecycleEvent) -> None:
        self.state = next_state(self.state, event)
        if has_ended(self.state):
            self._leave()

    def _leave(self) -> None:
        if self.ended.done():
            return
        self._end_service(self._reason or self.state)
        self._bus.publish(subjects.INSTANCE_GONE, InstanceGone(owner=self.owner, reason=self._reason or self.state))
        self.ended.set_result(self.state)

    def _end_service(self, reason: str) -> None:
        self._periodic.stop()
        for subscription in self._subscriptions:
            subscription.close()
        for part in (self._giver, self._memory, self._layouts, self._moves):
            if part is not None:
                part.stop()
        self._requests.abandon_traces(reason)

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

    def memory(self) -> MemoryReply | None:
        """The newest that is known of the engine's KV memory."""
        return self._memory.newest if self._memory is not None else None

    # ---- what the engine says

    def on_step(self, events: Sequence[TokenEvent]) -> None:
        """EngineListener."""
        if not has_ended(self.state):
            self._streams.on_step(events)

    def on_failure(self, failure: EngineFailure) -> None:
        """EngineListener."""
        self._fail(failure.reason)

    # ---- what frontends say

    def _on_submit(self, submit: Submit) -> SubmitReply:
        try:
            if submit.owner != self.owner:
                raise Stale(f"this is {self.owner}, not {submit.owner}")
            if self._requests.check_new(submit.key):
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
        record = self._requests.get(ask.key) or self._fenced(ask.key)
        return replays.answer(self.owner, ask.start, record, self.moves.moved(ask.key))

    def _fenced(self, key: RequestKey) -> RequestRecord | None:
        """The record that its frontend calls so already: it has raised the attempt, which isn't known here yet."""
        record = self._requests.find(key.request_id)
        if record is None or not record.fencing or key != record.key._replace(attempt=record.key.attempt + 1):
            return None
        return record

    def _on_cancel(self, cancel: Cancel) -> None:
        if cancel.owner != self.owner:
            return
        for key in cancel.keys:
            record = self._requests.get(key)
            if cancel.stale and record is not None and record.fencing:
                # Stale since its frontend raised the attempt, perhaps: the answer about that is on its way.
                continue
            self._close(key)
            moved = None if cancel.stale else self.moves.cancelled(key)
            if moved is not None:
                self._forward(cancel, moved)

    def _forward(self, cancel: Cancel, moved: Moved) -> None:
        """To where the request went."""
        further = Cancel(frontend=cancel.frontend, owner=moved.destination, keys=(moved.destination_key,))
        self._bus.publish(subjects.worker_cancel(moved.destination.instance_id), further)

    def _on_acknowledge(self, acknowledge: Acknowledge) -> None:
        if acknowledge.owner == self.owner:
            for key in acknowledge.keys:
                self._close(key)

    def _close(self, key: RequestKey) -> None:
        record = self._requests.find(key.request_id)
        running = self._requests.close(key, self._now_s())
        if running is not None:
            self._engine.cancel(running.key)
        if record is not None and self._requests.find(key.request_id) is not record:
            self.moves.closed(record)

    def _on_lease(self, lease: Lease) -> None:
        self._leases.renew(lease.frontend, lease.ttl_s, self._now_s())

    # ---- what operators and other incarnations say

    def _on_drain(self, request: DrainRequest) -> DrainReply:
        self.restart_wanted |= request.restart
        return DrainReply(owner=self.owner, requests_left=self.drain(request.deadline_s))

    def _on_status(self, _: StatusRequest) -> WorkerStatus:
        left_s = self._drain.until_s - self._now_s() if self.state is InstanceState.DRAINING else None
        report = self._load_report(self._engine.load(), self._now_s())
        return worker_status(report, self._engine_info(), self._requests, self.moves, left_s)

    def _on_own_load(self, report: LoadReport) -> None:
        if report.owner.incarnation > self.owner.incarnation and not has_ended(self.state):
            self._reason = f"superseded by {report.owner}"
            logger.warning("%s is %s", self.owner, self._reason)
            self._enter(LifecycleEvent.SUPERSEDED)

    def _tick(self) -> None:
        now_s = self._now_s()
        load = self._engine.load()
        if self._stall.is_stalled(load.step_count, bool(load.running or load.waiting), now_s):
            self._fail(f"no step for {self._options.engine_stall_s:.0f} s with {load.running} requests running")
            return
        if not self._leases.all_last(now_s):
            self._end_leases(now_s)
        self._streams.resend(now_s)
        self._requests.forget_tombstones(now_s)
        self._publish_load(load, now_s)
        self.moves.tick(now_s)
        if self._memory is not None:
            self._memory.tick(now_s)
        if self.state is InstanceState.DRAINING:
            self._go_on_draining(now_s)

    def _end_leases(self, now_s: float) -> None:
        for record in self._leases.orphans(self._requests, now_s):
            logger.warning("%s: lease of %s has ended", record.key, record.frontend)
            self.counters.leases_ended += 1
            self._close(record.key)
        self._leases.expire(now_s, self._options.tombstone_s)

    def _go_on_draining(self, now_s: float) -> None:
        running = self._requests.running()
        self.moves.draining.tick(now_s, self._drain.until_s)
        if self._drain.may_leave(running, self.unacknowledged(), now_s):
            self._reason = f"drained with {running} requests left" if running else "drained"
            self._enter(LifecycleEvent.DRAINED)

    def _report(self) -> None:
        self._publish_load(self._engine.load(), self._now_s())

    def _publish_load(self, load: EngineLoad, now_s: float) -> None:
        self._sequence += 1
        self._bus.publish(subjects.worker_load(self.owner.instance_id), self._load_report(load, now_s))

    def _load_report(self, load: EngineLoad, now_s: float) -> LoadReport:
        return load_report(
            self.owner,
            self.state,
            self._engine_info().model,
            load,
            sequence=self._sequence,
            emitted_ns=round(now_s * 1e9),
            usage=self._options.virtual_usage,
            layouts=self._layouts,
        )

    def _engine_info(self) -> EngineInfo:
        if self._info is None:
            raise Unavailable(f"{self.owner} is {self.state}")
        return self._info
