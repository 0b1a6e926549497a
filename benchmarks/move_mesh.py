"""What the move benchmark sees of a running mesh, and does to it: clients' streams over REST, every worker's token
messages on the bus, and orders to move.

Times are nanoseconds of the machine's monotonic clock, which all processes of it share.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx

from meshift.benchmarks.cpu_time import thread_cpu_ns
from meshift.schemas import subjects
from meshift.schemas.base import unpack_tokens
from meshift.schemas.identity import Owner
from meshift.schemas.instances import StatusRequest, WorkerStatus
from meshift.schemas.moves import MoveMode, MoveOrder, MoveReport
from meshift.schemas.requests import TokenBatch
from meshift.services.bus.base import Bus
from meshift.services.frontend.http.middleware import REQUEST_ID_HEADER

WAIT_DEADLINE_S = 300.0
STATUS_TIMEOUT_S = 10.0
ORDER_DEADLINE_S = 60.0
ALL_TOKENS = f"{subjects.PREFIX}.frontend.*.tokens"


class MoveBenchmarkError(Exception):
    """The mesh didn't do what the measurement needs."""


class TokenStep(NamedTuple):
    """What one engine step gave one request."""

    instance: str
    start: int
    tokens: int
    emitted_ns: int
    """When its worker sent it."""


class InstanceStep(NamedTuple):
    """One engine step of an instance, whichever requests were in it."""

    instance: str
    emitted_ns: int
    cpu_ns: int
    """That the step thread of the instance's first rank has used by then."""
    names: tuple[str, ...]
    """Streams with a token of this step."""


@dataclass
class ClientStream:
    """What a client got."""

    chunks: list[tuple[int, str]] = field(default_factory=list)
    """Text, and when it came."""
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(text for _, text in self.chunks)


@dataclass
class MeshStream:
    """One request: its client's end, and the workers'."""

    name: str
    prompt: Sequence[int]
    client: ClientStream = field(default_factory=ClientStream)
    request_id: str = ""
    """Known with the first token."""
    output: list[int] = field(default_factory=list)
    steps: list[TokenStep] = field(default_factory=list)
    task: "asyncio.Task[None] | None" = None

    @property
    def instance(self) -> str:
        """Where its newest token comes from."""
        return self.steps[-1].instance

    def take(self, step: TokenStep, tokens: Sequence[int]) -> None:
        """The next tokens; what came before is ignored. Raises MoveBenchmarkError if some are missing."""
        if step.start > len(self.output):
            raise MoveBenchmarkError(f"{self.name}: tokens {len(self.output)} to {step.start} were not heard")
        if step.tokens and step.start == len(self.output):
            self.output.extend(tokens)
            self.steps.append(step)


class TokenTap:
    """Hears all token messages."""

    def __init__(self) -> None:
        self.steps: list[InstanceStep] = []
        """Of instances in `step_threads`."""
        self.step_threads: dict[str, int] = {}
        """Main threads whose CPU time is wanted, by instance."""
        self._by_name: dict[str, MeshStream] = {}
        self._by_id: dict[str, MeshStream] = {}
        self._news = asyncio.Event()
        self._error: Exception | None = None

    def watch(self, stream: MeshStream) -> None:
        """Note this stream's tokens from now on."""
        self._by_name[stream.name] = stream

    def on_batch(self, batch: TokenBatch) -> None:
        """A subscription's handler."""
        try:
            self._take(batch)
        except Exception as error:
            self._error = error
        self._news.set()

    def _take(self, batch: TokenBatch) -> None:
        instance, tokens, offset = batch.owner.instance_id, unpack_tokens(batch.tokens), 0
        names = []
        for request_id, start, count in zip(batch.request_ids, batch.starts, batch.counts, strict=True):
            stream = self._find(request_id)
            if stream is not None and count:
                names.append(stream.name)
                stream.take(TokenStep(instance, start, count, batch.emitted_ns), tokens[offset : offset + count])
            offset += count
        thread = self.step_threads.get(instance)
        if thread is not None and names:
            self.steps.append(InstanceStep(instance, batch.emitted_ns, thread_cpu_ns(thread), tuple(names)))

    def _find(self, request_id: str) -> MeshStream | None:
        known = self._by_id.get(request_id)
        if known is None:
            # The frontend appends to what the client sends.
            known = self._by_name.get(request_id.rpartition("-")[0])
            if known is not None:
                known.request_id = request_id
                self._by_id[request_id] = known
        return known

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Returns once the condition holds, which is asked after each message. Raises MoveBenchmarkError."""
        try:
            async with asyncio.timeout(WAIT_DEADLINE_S):
                while self._error is None and not condition():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise MoveBenchmarkError(f"{WAIT_DEADLINE_S} s without {what}") from None
        if self._error is not None:
            raise self._error


class MoveMesh:
    """A mesh of two workers."""

    def __init__(self, rest: httpx.AsyncClient, bus: Bus, model: str) -> None:
        self.tap = TokenTap()
        self._rest = rest
        self._bus = bus
        self._model = model
        self._owners: dict[str, Owner] = {}
        self.ranks: dict[str, int] = {}
        """Process id of each instance's first rank."""

    async def join(self, instances: Sequence[str]) -> None:
        """Hear all tokens, and get to know the workers."""
        self._bus.subscribe(ALL_TOKENS, TokenBatch, self.tap.on_batch)
        await self._bus.flush(timeout_s=STATUS_TIMEOUT_S)
        for instance in instances:
            status = await self.status(instance)
            self._owners[instance], self.ranks[instance] = status.load.owner, status.ranks[0] if status.ranks else 0

    async def status(self, instance: str) -> WorkerStatus:
        """As the worker says."""
        subject = subjects.worker_status(instance)
        return await self._bus.request(subject, StatusRequest(), WorkerStatus, timeout_s=STATUS_TIMEOUT_S)

    async def prefilled(self, instance: str) -> int:
        """Tokens that its engine's prefills have computed so far."""
        return (await self.status(instance)).load.prefill_tokens

    def other(self, instance: str) -> str:
        """The other of the two."""
        return next(name for name in self._owners if name != instance)

    def open(self, name: str, prompt: Sequence[int], output_tokens: int, priority: int = 0) -> MeshStream:
        """Begin a greedy completion of exactly so many tokens."""
        stream = MeshStream(name, prompt)
        self.tap.watch(stream)
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "priority": priority,
        }
        stream.task = asyncio.get_running_loop().create_task(self._read(name, body, stream.client))
        return stream

    async def finish(self, stream: MeshStream) -> None:
        """Wait for its end, on both sides."""
        assert stream.task is not None
        async with asyncio.timeout(WAIT_DEADLINE_S):
            await stream.task

    async def close(self, stream: MeshStream) -> None:
        """The client goes away."""
        assert stream.task is not None
        stream.task.cancel()
        await asyncio.gather(stream.task, return_exceptions=True)

    async def until_tokens(self, stream: MeshStream, count: int) -> None:
        """Until it has so many in all. Raises what its client got instead."""
        assert stream.task is not None
        task = stream.task
        await self.tap.until(
            lambda: len(stream.output) >= count or (task.done() and task.exception() is not None), f"{count} tokens"
        )
        if task.done():
            task.result()

    async def order(self, stream: MeshStream, mode: MoveMode) -> MoveReport:
        """Move it to the other instance; returns when that has ended."""
        source = stream.instance
        order = MoveOrder(
            owner=self._owners[source],
            request_id=stream.request_id,
            destination=self._owners[self.other(source)],
            mode=mode,
            deadline_s=ORDER_DEADLINE_S,
        )
        timeout_s = ORDER_DEADLINE_S + STATUS_TIMEOUT_S
        return await self._bus.request(subjects.worker_move(source), order, MoveReport, timeout_s=timeout_s)

    async def _read(self, name: str, body: dict[str, Any], into: ClientStream) -> None:
        headers = {REQUEST_ID_HEADER: name}
        request = {**body, "stream": True}
        async with self._rest.stream("POST", "/v1/completions", json=request, headers=headers) as response:
            if response.status_code != httpx.codes.OK:
                raise MoveBenchmarkError((await response.aread()).decode())
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    _take_event(into, json.loads(line.removeprefix("data: ")), time.monotonic_ns())


def _take_event(into: ClientStream, event: dict[str, Any], now_ns: int) -> None:
    if "error" in event:
        raise MoveBenchmarkError(event["error"]["message"])
    for choice in event["choices"]:
        if choice["text"]:
            into.chunks.append((now_ns, choice["text"]))
        into.finish_reason = choice["finish_reason"] or into.finish_reason
