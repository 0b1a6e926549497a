"""Generates on one instance, past scheduler and frontends: who measures an instance must know what runs there."""

import asyncio
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from meshift.schemas import subjects
from meshift.schemas.base import pack_tokens
from meshift.schemas.errors import MeshError
from meshift.schemas.identity import FrontendRef, Owner, RequestKey
from meshift.schemas.instances import InstanceState, LoadReport, StatusRequest, WorkerStatus
from meshift.schemas.requests import Acknowledge, Cancel, FinishReason, Lease, Sampling, Submit, SubmitReply, TokenBatch
from meshift.services.bus.base import Bus
from meshift.services.periodic import Periodic

ASK_TIMEOUT_S = 10.0
LEASE_INTERVAL_S = 1.0
LEASE_TTL_S = 5.0
IDLE_S_MAX = 30.0
"""How long an instance may take to become idle."""
LOOK_S = 0.05
TOKEN_LOW = 3
"""Ids below are special tokens in most vocabularies."""


class ProbeError(Exception):
    """The instance can't be measured now; the message says why."""


@dataclass(slots=True)
class ProbedRequest:
    """One request, and when its tokens came."""

    key: RequestKey
    prompt_tokens: int
    submitted_s: float
    """By the loop's clock, as is `first_s`."""
    first_s: float = 0.0
    emitted_ns: list[int] = field(default_factory=list)
    """Of each token, by the instance's clock."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    error: str = ""


class InstanceProbe:
    """Of one live instance. `stall_s`: silence after which it is given up."""

    def __init__(self, bus: Bus, ref: FrontendRef, rng: random.Random, stall_s: float) -> None:
        self._bus = bus
        self._ref = ref
        self._rng = rng
        self._stall_s = stall_s
        self._numbers = 0
        self._open: dict[str, ProbedRequest] = {}
        self._news = asyncio.Event()
        self._leases = Periodic(LEASE_INTERVAL_S, self._renew)
        self.report: LoadReport
        self.engine = ""

    async def start(self, instance_id: str) -> None:
        """On a bus that has been started. Raises ProbeError, PeerGone."""
        self._bus.subscribe(subjects.frontend_tokens(self._ref.frontend_id), TokenBatch, self._on_tokens)
        await self._bus.flush(timeout_s=ASK_TIMEOUT_S)
        status = await self._status(instance_id)
        if status.load.state is not InstanceState.READY:
            raise ProbeError(f"{instance_id} is {status.load.state}")
        self.report, self.engine = status.load, status.engine
        self._renew()
        self._leases.start()

    def stop(self) -> None:
        """Let nothing of ours run on. Idempotent."""
        self._leases.stop()
        keys = tuple(request.key for request in self._open.values())
        if keys:
            cancel = Cancel(frontend=self._ref, owner=self.owner, keys=keys)
            self._bus.publish(subjects.worker_cancel(self.owner.instance_id), cancel)
        self._open.clear()

    @property
    def owner(self) -> Owner:
        """Whom it measures."""
        return self.report.owner

    async def until_idle(self) -> None:
        """Until nothing runs there. Raises ProbeError."""
        try:
            async with asyncio.timeout(IDLE_S_MAX):
                while True:
                    load = (await self._status(self.owner.instance_id)).load
                    if load.owner != self.owner:
                        raise ProbeError(f"{self.owner} was started again meanwhile")
                    if not load.running and not load.waiting:
                        return
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            raise ProbeError(
                f"{self.owner.instance_id} serves other requests: what is measured must be its only work"
            ) from None

    async def generate(self, requests: int, prompt_tokens: int, output_tokens: int) -> list[ProbedRequest]:
        """So many requests at once, of random prompts that no cache knows; returns when all have ended. Raises
        ProbeError."""
        waiting = [await self._submit(prompt_tokens, output_tokens) for _ in range(requests)]
        for request in waiting:
            await self._until_ended(request)
        failed = [request.error for request in waiting if request.error]
        if failed:
            raise ProbeError(f"{self.owner.instance_id}: {failed[0]}")
        return waiting

    async def _submit(self, prompt_tokens: int, output_tokens: int) -> ProbedRequest:
        self._numbers += 1
        key = RequestKey(f"calibrate-{self._ref.incarnation}-{self._numbers}", 1, 0)
        prompt = array("i", self._rng.choices(range(TOKEN_LOW, self.report.model.vocabulary_size), k=prompt_tokens))
        submit = Submit(
            request_id=key.request_id,
            attempt=key.attempt,
            owner=self.owner,
            frontend=self._ref,
            prompt=pack_tokens(prompt),
            sampling=Sampling(max_new_tokens=output_tokens, temperature=0.0, ignore_eos=True),
        )
        request = ProbedRequest(key, prompt_tokens, self._now_s())
        self._open[key.request_id] = request
        subject = subjects.worker_submit(self.owner.instance_id)
        try:
            await self._bus.request(subject, submit, SubmitReply, timeout_s=ASK_TIMEOUT_S)
        except MeshError as error:
            raise ProbeError(f"{self.owner.instance_id} takes no request: {error}") from error
        return request

    async def _until_ended(self, request: ProbedRequest) -> None:
        while not request.ended.is_set():
            self._news.clear()
            try:
                async with asyncio.timeout(self._stall_s):
                    await self._news.wait()
            except TimeoutError:
                raise ProbeError(f"{self.owner.instance_id} gave no token for {self._stall_s:g} s") from None

    # ---- what the instance says

    def _on_tokens(self, batch: TokenBatch) -> None:
        now_s = self._now_s()
        finishes = {item.row: item.finish for item in batch.finishes}
        ended = []
        columns = zip(batch.request_ids, batch.hops, batch.starts, batch.counts, strict=True)
        for row, (request_id, hop, start, count) in enumerate(columns):
            request = self._open.get(request_id)
            if request is None:
                continue
            self._take(request, batch, hop, start, count, now_s)
            finish = finishes.get(row)
            if finish is not None:
                if finish.reason is not FinishReason.LENGTH:
                    request.error = request.error or f"a request ended by {finish.reason}: {finish.message}"
                ended.append(self._end(request))
        if ended:
            acknowledge = Acknowledge(frontend=self._ref, owner=batch.owner, keys=tuple(ended))
            self._bus.publish(subjects.worker_acknowledge(batch.owner.instance_id), acknowledge)
        self._news.set()

    def _take(self, request: ProbedRequest, batch: TokenBatch, hop: int, start: int, count: int, now_s: float) -> None:
        if batch.owner != self.owner or hop:
            request.error = (
                "a request was moved away while it was measured; `meshift policy set migration.enabled=false` meanwhile"
            )
            self._end(request)
        elif start > len(request.emitted_ns):
            request.error = f"tokens were lost on the bus ({len(request.emitted_ns)} to {start})"
        elif count:
            if not request.emitted_ns:
                request.first_s = now_s
            request.emitted_ns += [batch.emitted_ns] * (start + count - len(request.emitted_ns))

    def _end(self, request: ProbedRequest) -> RequestKey:
        self._open.pop(request.key.request_id, None)
        request.ended.set()
        return request.key

    async def _status(self, instance_id: str) -> WorkerStatus:
        subject = subjects.worker_status(instance_id)
        return await self._bus.request(subject, StatusRequest(), WorkerStatus, timeout_s=ASK_TIMEOUT_S)

    def _renew(self) -> None:
        self._bus.publish(subjects.LEASE, Lease(frontend=self._ref, ttl_s=LEASE_TTL_S))

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()


def step_gaps(requests: Sequence[ProbedRequest], settle_steps: int) -> list[tuple[int, int]]:
    """Of the decode steps that all requests took part in: tokens in the batch before it, and its time in ns."""
    reference = max(requests, key=lambda request: request.emitted_ns[0])
    last_ns = min(request.emitted_ns[-1] for request in requests)
    gaps = []
    for index in range(1 + settle_steps, len(reference.emitted_ns)):
        before_ns, at_ns = reference.emitted_ns[index - 1], reference.emitted_ns[index]
        if at_ns > last_ns:
            break
        # The newest token of each has no KV yet: the step computes it.
        tokens = sum(
            request.prompt_tokens + sum(ns <= before_ns for ns in request.emitted_ns) - 1 for request in requests
        )
        gaps.append((tokens, at_ns - before_ns))
    return gaps
