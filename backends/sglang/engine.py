"""SGLang as the mesh's engine: `Engine` of `backends/base.py` over one instance's rank processes."""

import asyncio
import logging
import random
from dataclasses import replace

from meshift.backends.base import (
    EngineFailure,
    EngineInfo,
    EngineListener,
    EngineLoad,
    EngineRequest,
    EngineStartError,
    KvResized,
    TokenEvent,
)
from meshift.backends.sglang import wire
from meshift.backends.sglang.admission import RequestLimits, check_request
from meshift.backends.sglang.instance import RankInstance
from meshift.backends.sglang.lifecycle import EngineEvent, EngineState, next_state
from meshift.backends.sglang.requests import RequestTable
from meshift.backends.sglang.settings import SglangSettings
from meshift.schemas.errors import Unavailable
from meshift.schemas.identity import RequestKey
from meshift.schemas.instances import ModelInfo
from meshift.schemas.requests import Sampling

logger = logging.getLogger(__name__)

INTEGRITY_TIMEOUT_S = 60.0
"""A rank answers between two steps, and a prefill step may take long."""

START_ABORT_DEADLINE_S = 2.0
WARM_UP_KEY = RequestKey("warm-up", 0, 0)
WARM_UP_TOKENS = 8
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
        self._warm_up: asyncio.Future[None] | None = None
        self._cleanup: asyncio.Task[None] | None = None

    def _move(self, event: EngineEvent) -> None:
        self._state = next_state(self._state, event)

    # ---- life ----

    async def start(self, listener: EngineListener) -> EngineInfo:
        """See `Engine.start`. Progress goes to the log."""
        self._move(EngineEvent.START)
        self._listener = listener
        try:
            ready = await self._instance.start()
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
        )

    async def _run_warm_up(self) -> None:
        """One request with all the trimmings, so that the first real one doesn't pay for first times."""
        assert self._limits is not None
        sampling = Sampling(
            max_new_tokens=WARM_UP_TOKENS,
            min_new_tokens=WARM_UP_TOKENS,
            top_p=0.9,
            top_k=50,
            frequency_penalty=0.1,
            presence_penalty=0.1,
            repetition_penalty=1.1,
            ignore_eos=True,
            seed=0,
            logprobs=1,
        )
        prompt = [1 + index % (self._limits.vocabulary_size - 1) for index in range(WARM_UP_TOKENS)]
        self._warm_up = asyncio.get_running_loop().create_future()
        self._instance.send(self._table.open(EngineRequest(WARM_UP_KEY, prompt, (), sampling), seed=0))
        try:
            await asyncio.wait_for(self._warm_up, self._settings.start_timeout_s)
        except TimeoutError:
            raise EngineStartError("the ranks are up but give no tokens") from None
        self._instance.send(wire.FlushCache())
        await self.check_integrity()

    async def stop(self, deadline_s: float) -> None:
        """See `Engine.stop`. A start that is under way raises."""
        self._move(EngineEvent.STOP)
        if self._warm_up is not None and not self._warm_up.done():
            self._warm_up.set_exception(EngineStartError("the engine was stopped"))
        if self._cleanup is not None:
            await self._cleanup
        await self._instance.stop(deadline_s)

    def _fail(self, reason: str) -> None:
        """The ranks are lost. In a running engine the listener hears of it, once."""
        if self._warm_up is not None and not self._warm_up.done():
            self._warm_up.set_exception(EngineStartError(reason))
            return
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
        check_request(request, self._limits)
        command = self._table.open(request, self._seeds.getrandbits(63))
        try:
            self._instance.send(command)
        except Exception:
            self._table.withdraw(request.key)
            raise

    def cancel(self, key: RequestKey) -> None:
        """See `Engine.cancel`."""
        if self._state is EngineState.RUNNING and key in self._table:
            self._instance.send(wire.Cancel(rid=wire.encode_rid(key)))

    def _receive(self, report: wire.Report) -> None:
        match report:
            case wire.LoadSnapshot():
                self._snapshot = report
            case wire.StepReport():
                self._snapshot = report.load
                self._deliver(self._table.take_step(report))
            case _:
                raise AssertionError(f"unexpected {type(report).__name__}")

    def _deliver(self, events: list[TokenEvent]) -> None:
        if self._state is EngineState.RUNNING and self._listener is not None:
            self._listener.on_step(events)
        elif self._warm_up is not None and not self._warm_up.done() and events[-1].finish is not None:
            self._warm_up.set_result(None)

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
        )

    # ---- state ----

    def load(self) -> EngineLoad:
        """See `Engine.load`."""
        if self._snapshot is None:
            raise Unavailable(f"the engine is {self._state}")
        return self._table.load(self._snapshot)

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
