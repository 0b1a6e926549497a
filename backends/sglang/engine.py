"""SGLang as the mesh's engine: `Engine` of `backends/base.py` over one instance's rank processes."""

import asyncio
import logging
import random
from collections.abc import Coroutine, Sequence
from dataclasses import astuple, replace
from typing import Any, TypeVar

from meshift.backends.base import (
    Capability,
    Committed,
    DeltaSent,
    EngineFailure,
    EngineInfo,
    EngineListener,
    EngineLoad,
    EngineRequest,
    EngineStartError,
    FrozenRequest,
    KvMemoryNow,
    KvResized,
    MoveBegun,
    MoveKey,
    MoveRefused,
    Refusal,
    Reserved,
    TokenEvent,
)
from meshift.backends.layouts import Layout, LayoutChange, LayoutCommitted, LayoutNow, LayoutProgress, LayoutRefused
from meshift.backends.sglang import wire
from meshift.backends.sglang import wire_layers as layers
from meshift.backends.sglang import wire_moves as moves
from meshift.backends.sglang.admission import RequestLimits, check_request
from meshift.backends.sglang.instance import RankInstance
from meshift.backends.sglang.layers import LayerChanges
from meshift.backends.sglang.lifecycle import EngineEvent, EngineState, next_state
from meshift.backends.sglang.moves_in import MovesIn
from meshift.backends.sglang.moves_out import MovesOut
from meshift.backends.sglang.pairs import layout_of
from meshift.backends.sglang.questions import RanksDiffer
from meshift.backends.sglang.requests import RequestTable
from meshift.backends.sglang.settings import SglangSettings
from meshift.backends.sglang.units import units_of
from meshift.backends.sglang.warm_up import WarmUp
from meshift.backends.sglang.weights import fingerprint
from meshift.kv_memory.layout import KvLayout
from meshift.schemas.errors import Unavailable
from meshift.schemas.identity import RequestKey
from meshift.schemas.instances import ModelInfo
from meshift.schemas.layouts import CommitMode, LayoutRefusal

T = TypeVar("T")

logger = logging.getLogger(__name__)

INTEGRITY_TIMEOUT_S = 60.0
"""A rank answers between two steps, and a prefill step may take long."""

START_ABORT_DEADLINE_S = 2.0
FAILURE_STOP_DEADLINE_S = 0.5


class SglangEngine:
    """One instance of SGLang: `tensor_ranks` x `pipeline_stages` processes."""

    def __init__(self, settings: SglangSettings, seeds: random.Random | None = None) -> None:
        """`seeds` draws the seeds of requests that come without one; by default from the system's entropy."""
        self._settings = settings
        self._seeds = seeds or random.SystemRandom()
        self._state = EngineState.NEW
        self._table = RequestTable()
        self._instance = RankInstance(settings, self._receive, self._fail)
        self._listener: EngineListener | None = None
        self._limits: RequestLimits | None = None
        self._snapshot: wire.LoadSnapshot | None = None
        self._layout: KvLayout | None = None
        self._moves_out = MovesOut(self._instance, self._table, lambda: self._layout, verify=settings.verify_moves)
        self._moves_in = MovesIn(self._instance, self._table, lambda: self._layout, self._check)
        self._changes = LayerChanges(self._instance, settings, self._note_layout)
        self._steps: set[asyncio.Task[Any]] = set()
        """Of moves, and of changes of layers; ended by the ranks' answers or their end."""
        self._warm_up: WarmUp | None = None
        self._cleanup: asyncio.Task[None] | None = None

    def _move(self, event: EngineEvent) -> None:
        self._state = next_state(self._state, event)

    # ---- life ----

    async def start(self, listener: EngineListener) -> EngineInfo:
        """See `Engine.start`. Progress goes to the log."""
        self._move(EngineEvent.START)
        self._listener = listener
        try:
            ranks = await self._instance.start()
            ready = ranks[0]
            weights = await asyncio.to_thread(fingerprint, self._settings.model_path)
            self._layout = layout_of([rank.share for rank in ranks], self._settings.tensor_ranks, weights)
            self._changes.start(ranks)
            self._limits = RequestLimits(ready.request_tokens_max, ready.vocabulary_size, ready.obeys_schemas)
            await self._run_warm_up()
            self._move(EngineEvent.READY)
        except BaseException:
            self._move(EngineEvent.FAIL)
            await self._instance.stop(START_ABORT_DEADLINE_S)
            raise
        return self._info(ready)

    def _info(self, ready: wire.RankReady) -> EngineInfo:
        settings = self._settings
        return EngineInfo(
            name="sglang",
            model=ModelInfo(
                name=settings.model_name,
                path=str(settings.model_path),
                context_tokens_max=ready.request_tokens_max,
                vocabulary_size=ready.vocabulary_size,
                layers=ready.layers,
            ),
            capacity=ready.capacity,
            page_size=ready.page_size,
            pipeline_stages=settings.pipeline_stages,
            tensor_ranks=settings.tensor_ranks,
            rank_pids=self._instance.pids,
            capabilities=self._capabilities(),
            layout=self._layout,
        )

    def _capabilities(self) -> frozenset[Capability]:
        moves_requests = {Capability.MOVE_REQUESTS} if self._layout is not None else set()
        moves_layers = {Capability.CHANGE_LAYOUT} if not self._changes.obstacle else set()
        return frozenset(moves_requests | moves_layers)

    async def _run_warm_up(self) -> None:
        assert self._limits is not None
        warm_up = self._warm_up = WarmUp(self._limits.vocabulary_size, self._limits.tokens_max)

        def submit(request: EngineRequest) -> None:
            self._instance.send(self._table.open(request, seed=0))

        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                await warm_up.run(submit)
                if self._layout is not None:
                    await warm_up.run_move(submit, self._send_cancel, self._moves_out, self._moves_in, self._layout)
        except TimeoutError:
            raise EngineStartError("the ranks are up but give no tokens") from None
        self._instance.send(wire.FlushCache())
        await self.check_integrity()
        self._warm_up = None

    async def stop(self, deadline_s: float) -> None:
        """See `Engine.stop`. A start that is under way raises."""
        self._move(EngineEvent.STOP)
        if self._warm_up is not None:
            self._warm_up.fail("the engine was stopped")
        self._moves_in.end()
        if self._cleanup is not None:
            await self._cleanup
        await self._instance.stop(deadline_s)

    def _fail(self, reason: str) -> None:
        """The ranks are lost. In a running engine the listener hears of it, once."""
        if self._warm_up is not None:
            self._warm_up.fail(reason)
            return
        self._moves_in.end()
        was_running = self._state is EngineState.RUNNING
        self._move(EngineEvent.FAIL)
        if was_running and self._listener is not None:
            # Ranks that are left have lost their peers; they must not hold memory until somebody calls `stop`.
            stop = self._instance.stop(FAILURE_STOP_DEADLINE_S)
            self._cleanup = asyncio.get_running_loop().create_task(stop)
            self._listener.on_failure(EngineFailure(reason))

    # ---- requests ----

    def submit(self, request: EngineRequest) -> None:
        """See `Engine.submit`. Also raises Unavailable when the engine doesn't run, and Overloaded."""
        if self._state is not EngineState.RUNNING or self._limits is None:
            raise Unavailable(f"the engine is {self._state}")
        self._check(request)
        command = self._table.open(request, self._seeds.getrandbits(63))
        try:
            self._instance.send(command)
        except Exception:
            self._table.withdraw(request.key)
            raise

    def _check(self, request: EngineRequest) -> None:
        assert self._limits is not None
        check_request(request, self._limits)

    def cancel(self, key: RequestKey) -> None:
        """See `Engine.cancel`."""
        if self._state is EngineState.RUNNING:
            self._send_cancel(key)

    def _send_cancel(self, key: RequestKey) -> None:
        rid = self._table.rid(key)
        if rid is not None:
            self._instance.send(wire.Cancel(rid=rid))

    def _receive(self, report: wire.Report) -> None:
        match report:
            case wire.LoadSnapshot():
                self._snapshot = report
            case wire.StepReport():
                self._snapshot = report.load
                self._deliver(self._table.take_step(report))
            case moves.Applied():
                self._moves_in.note_applied(report)
            case layers.LayersExpired():
                self._changes.note_expired(report)
            case _:
                raise AssertionError(f"unexpected {type(report).__name__}")

    def _deliver(self, events: list[TokenEvent]) -> None:
        for event in events:
            if event.finish is not None:
                self._moves_out.ended(event.key)
        if self._state is EngineState.RUNNING and self._listener is not None:
            self._listener.on_step(events)
        elif self._warm_up is not None:
            self._warm_up.on_step(events)

    # ---- moves ----

    async def begin_move(self, key: MoveKey) -> MoveBegun:
        """See `MovableEngine.begin_move`."""
        return await self._trusting(self._moves_out.begin(key))

    async def send_delta(self, key: MoveKey, start: int, reserved: Reserved) -> DeltaSent:
        """See `MovableEngine.send_delta`."""
        return await self._trusting(self._moves_out.send(key, start, reserved))

    async def freeze(self, key: MoveKey, start: int, reserved: Reserved | None) -> FrozenRequest:
        """See `MovableEngine.freeze`."""
        return await self._trusting(self._moves_out.freeze(key, start, reserved))

    async def release(self, key: MoveKey) -> None:
        """See `MovableEngine.release`."""
        if self._state is EngineState.RUNNING:
            await self._to_the_end(self._moves_out.release(key))

    async def resume(self, key: MoveKey, attempt: int) -> None:
        """See `MovableEngine.resume`."""
        if self._state is EngineState.RUNNING:
            await self._to_the_end(self._moves_out.resume(key, attempt))

    async def learn_schema(self, json_schema: str) -> None:
        """See `MovableEngine.learn_schema`."""
        await self._trusting(self._moves_in.learn_schema(json_schema))

    async def reserve(
        self, key: MoveKey, layout: KvLayout, tokens: Sequence[int], slots: int, deadline_s: float
    ) -> Reserved:
        """See `MovableEngine.reserve`."""
        return await self._to_the_end(self._moves_in.reserve(key, layout, tokens, slots, deadline_s))

    async def commit(self, key: MoveKey, frozen: FrozenRequest, request: EngineRequest, timeout_s: float) -> Committed:
        """See `MovableEngine.commit`."""
        return await self._to_the_end(self._moves_in.commit(key, frozen, request, timeout_s))

    async def abort(self, key: MoveKey) -> None:
        """See `MovableEngine.abort`."""
        if self._state is EngineState.RUNNING:
            await self._to_the_end(self._moves_in.abort(key))

    async def _to_the_end(self, step: Coroutine[Any, Any, T]) -> T:
        """Do a step of a move, also when nobody waits for it any more: what it asks the ranks for is done in any case,
        and must be known here."""
        task = asyncio.get_running_loop().create_task(self._trusting(step))
        self._steps.add(task)
        task.add_done_callback(self._steps.discard)
        return await asyncio.shield(task)

    async def _trusting(self, step: Coroutine[Any, Any, T]) -> T:
        """Do a step of a move. Ranks that differ can't be trusted with anything any more."""
        if self._state is not EngineState.RUNNING:
            step.close()
            raise MoveRefused(f"the engine is {self._state}", Refusal.UNKNOWN)
        try:
            return await step
        except RanksDiffer as error:
            self._fail(str(error))
            raise MoveRefused(str(error), Refusal.BROKEN) from error

    # ---- layers ----

    async def layout(self) -> LayoutNow:
        """See `ReconfigurableEngine.layout`."""
        return self._changes.now(self._layout, self.load().capacity)

    def _note_layout(self, layout: Layout) -> None:
        if self._layout is not None:
            self._layout = replace(self._layout, layer_ranges=layout.layer_ranges)

    async def begin_layout(self, change: LayoutChange) -> None:
        """See `ReconfigurableEngine.begin_layout`."""
        await self._change(self._changes.begin(change))

    async def load_weights(self, change_id: str) -> None:
        """See `ReconfigurableEngine.load_weights`."""
        await self._change(self._changes.load(change_id))

    async def start_kv_migration(self, change_id: str, bytes_per_s: float | None) -> None:
        """See `ReconfigurableEngine.start_kv_migration`."""
        await self._change(self._changes.copy(change_id, bytes_per_s))

    async def layout_progress(self, change_id: str) -> LayoutProgress:
        """See `ReconfigurableEngine.layout_progress`."""
        return await self._change(self._changes.progress(change_id))

    async def commit_layout(self, change_id: str, commit: CommitMode, timeout_s: float) -> LayoutCommitted:
        """See `ReconfigurableEngine.commit_layout`."""
        if self._moves_in.reserved or self._moves_out.frozen:
            raise LayoutRefused("requests move", LayoutRefusal.BUSY)
        done = await self._change(self._changes.commit(change_id, commit, timeout_s))
        return LayoutCommitted(await self.layout(), *astuple(done))

    async def abort_layout(self, change_id: str) -> None:
        """See `ReconfigurableEngine.abort_layout`."""
        await self._change(self._changes.abort(change_id))

    async def _change(self, step: Coroutine[Any, Any, T]) -> T:
        """Do a step of a change to its end, whoever still waits for it. Raises what it raises, and Unavailable."""
        if self._state is not EngineState.RUNNING:
            step.close()
            raise Unavailable(f"the engine is {self._state}")
        task = asyncio.get_running_loop().create_task(step)
        self._steps.add(task)
        task.add_done_callback(self._steps.discard)
        try:
            return await asyncio.shield(task)
        except RanksDiffer as error:
            self._fail(str(error))
            raise Unavailable(str(error)) from error

    # ---- memory ----

    async def resize_kv(self, capacity: int, *, preempt: bool = False) -> KvResized:
        """See `ResizableEngine.resize_kv`."""
        if self._state is not EngineState.RUNNING or self._limits is None:
            raise Unavailable(f"the engine is {self._state}")
        answers = await self._instance.resize(capacity, preempt, INTEGRITY_TIMEOUT_S)
        first = answers[0]
        decisions = {(a.iteration, a.capacity, a.request_tokens_max, a.preempted) for a in answers}
        if len(decisions) != 1:
            raise AssertionError(f"ranks differ: {decisions}")
        self._limits = replace(self._limits, tokens_max=first.request_tokens_max)
        return KvResized(
            capacity=first.capacity,
            request_tokens_max=first.request_tokens_max,
            evicted=first.evicted,
            preempted=first.preempted,
            released_bytes=sum(answer.released_bytes for answer in answers),
            resident_bytes=sum(answer.resident_bytes for answer in answers),
            reason=first.reason,
            duration_ns=max(answer.duration_ns for answer in answers),
            units=units_of([answer.units for answer in answers], self._settings.tensor_ranks),
        )

    async def kv_memory(self) -> KvMemoryNow:
        """See `ResizableEngine.kv_memory`."""
        if self._state is not EngineState.RUNNING or self._limits is None:
            raise Unavailable(f"the engine is {self._state}")
        answers = await self._instance.ask_memory(INTEGRITY_TIMEOUT_S)
        return KvMemoryNow(
            request_tokens_max=self._limits.tokens_max,
            resident_bytes=sum(answer.resident_bytes for answer in answers),
            units=units_of([answer.units for answer in answers], self._settings.tensor_ranks),
        )

    # ---- state ----

    def load(self) -> EngineLoad:
        """See `Engine.load`."""
        if self._snapshot is None:
            raise Unavailable(f"the engine is {self._state}")
        return self._table.load(self._snapshot)

    def held_tokens(self, key: RequestKey) -> int | None:
        """See `Engine.held_tokens`."""
        return None if self._snapshot is None else self._table.held_tokens(key, self._snapshot)

    async def check_integrity(self) -> None:
        """See `Engine.check_integrity`; also that all ranks have taken the same decisions. Raises TimeoutError if
        they don't answer."""
        reports = await self._instance.ask_integrity(INTEGRITY_TIMEOUT_S)
        problems = [f"rank {report.rank}: {problem}" for report in reports for problem in report.problems]
        points = {(report.iteration, report.fingerprint) for report in reports}
        if len(points) != 1:
            problems.append(f"ranks differ: {[(r.rank, r.iteration, r.fingerprint) for r in reports]}")
        if problems:
            raise AssertionError("; ".join(problems))
