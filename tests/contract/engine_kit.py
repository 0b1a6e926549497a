"""What the engine suites are written with: a listener that checks the contract, and handles on engines."""

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from meshift.backends.base import (
    DeltaSent,
    Engine,
    EngineFailure,
    EngineInfo,
    EngineLoad,
    EngineRequest,
    FrozenRequest,
    MovableEngine,
    MoveBegun,
    MoveKey,
    MoveRefused,
    Refusal,
    Reserved,
    TokenEvent,
)
from meshift.kv_memory.layout import KvLayout
from meshift.schemas.identity import RequestKey
from meshift.schemas.requests import Finish, Priority, Sampling, TokenLogprob

POLL_S = 0.01
_numbers = itertools.count(1)


@dataclass
class Stream:
    """What the listener got for one key."""

    first: int
    tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    queued_ns: int | None = None


class CollectingListener:
    """An `EngineListener` that keeps all streams, and a list of whatever broke the contract."""

    def __init__(self) -> None:
        self.streams: dict[RequestKey, Stream] = {}
        self.problems: list[str] = []
        self.failures: list[EngineFailure] = []
        self.calls = 0
        self.hooks: list[Callable[[], None]] = []
        """Called after every step, inside `on_step`."""
        self._waiters: list[asyncio.Future[None]] = []

    def open(self, key: RequestKey, first: int) -> Stream:
        """Expect events of `key`, whose first token has index `first`."""
        return self.streams.setdefault(key, Stream(first))

    def on_step(self, events: Sequence[TokenEvent]) -> None:
        self.calls += 1
        if self.failures:
            self.problems.append("on_step after on_failure")
        for event in events:
            self._take(event)
        for hook in list(self.hooks):
            hook()
        self._wake()

    def _take(self, event: TokenEvent) -> None:
        stream = self.streams.get(event.key)
        if stream is None:
            self.problems.append(f"event of an unknown key: {event}")
            return
        if stream.finish is not None:
            self.problems.append(f"event after the finish: {event}")
        due = stream.first + len(stream.tokens)
        if event.start != due:
            self.problems.append(f"start {event.start} where {due} is due: {event.key}")
        if not event.tokens and event.finish is None:
            self.problems.append(f"empty event: {event.key}")
        if event.logprobs is not None and len(event.logprobs) != len(event.tokens):
            self.problems.append(f"{len(event.logprobs)} log-probabilities of {len(event.tokens)} tokens: {event.key}")
        if event.queued_ns is not None:
            if not event.tokens or stream.tokens:
                self.problems.append(f"queueing told with other than the first tokens: {event.key}")
            stream.queued_ns = event.queued_ns
        stream.tokens.extend(event.tokens)
        stream.logprobs.extend(event.logprobs or ())
        stream.finish = event.finish

    def on_failure(self, failure: EngineFailure) -> None:
        self.calls += 1
        self.failures.append(failure)
        print(f"an engine has failed: {failure.reason}")
        if len(self.failures) > 1:
            self.problems.append("on_failure twice")
        self._wake()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def until(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Wait until `condition` holds, looked at after every listener call."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not condition():
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiters.append(waiter)
            try:
                await asyncio.wait_for(waiter, max(0.0, deadline - loop.time()))
            except TimeoutError:
                trouble = f"problems: {self.problems}, failures: {self.failures}"
                raise AssertionError(f"{timeout_s} s without: {what}; {trouble}") from None


@dataclass
class Rig:
    """A started engine, its listener, and how to use it."""

    engine: Engine
    info: EngineInfo
    listener: CollectingListener
    random: random.Random
    """Seeded; whose seed a failing test prints is the fixture's business."""
    token_range: tuple[int, int]
    """Token ids of prompts, [low, high)."""
    timeout_s: float
    """The longest that any test may wait for a request, on the running loop's clock."""
    prompt_tokens: int = 24
    output_tokens: int = 12
    long_tokens: int = 240
    """An output that is still being generated when a test cancels or moves it."""
    concurrency: int = 12
    """How many requests at once are many here."""
    filler_prompts: Sequence[int] = ()
    """Prompts of requests (with `long_tokens` of output) that fill the engine: while they run, a request with a prompt
    of `waiter_tokens` waits. Where requests move, it fits beside the other engine's."""
    waiter_tokens: int = 0
    long_moves: int = 3
    """How many long requests run and move at once."""

    def prompt(self, count: int | None = None) -> list[int]:
        """Random token ids."""
        return [self.random.randrange(*self.token_range) for _ in range(count or self.prompt_tokens)]

    def request(
        self,
        prompt: Sequence[int] | None = None,
        *,
        output: Sequence[int] = (),
        max_new_tokens: int | None = None,
        stop_token_ids: tuple[int, ...] = (),
        ignore_eos: bool = True,
        priority: int = 0,
        logprobs: int | None = None,
    ) -> EngineRequest:
        """A greedy request with a new id."""
        sampling = Sampling(
            max_new_tokens=self.output_tokens if max_new_tokens is None else max_new_tokens,
            temperature=0.0,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
            logprobs=logprobs,
        )
        key = RequestKey(f"suite-{next(_numbers)}", 1, 0)
        tokens = self.prompt() if prompt is None else prompt
        return EngineRequest(key, tokens, output, sampling, Priority(scheduling=priority))

    def submit(self, request: EngineRequest) -> Stream:
        """Submit it and begin to collect."""
        stream = self.listener.open(request.key, len(request.output))
        try:
            self.engine.submit(request)
        except BaseException:
            del self.listener.streams[request.key]
            raise
        return stream

    async def finished(self, *streams: Stream) -> None:
        """Wait for the ends of all of them."""
        await self.listener.until(
            lambda: all(stream.finish is not None for stream in streams), self.timeout_s, "all finishes"
        )

    async def produced(self, stream: Stream, count: int) -> None:
        """Wait until `count` tokens have come (or the end)."""
        await self.listener.until(
            lambda: len(stream.tokens) >= count or stream.finish is not None, self.timeout_s, f"{count} tokens"
        )

    async def generate(self, request: EngineRequest) -> list[int]:
        """Submit and wait; the new tokens."""
        stream = self.submit(request)
        await self.finished(stream)
        return stream.tokens

    async def eventually(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for something that no listener call announces, such as a load."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.timeout_s
        while not condition():
            assert loop.time() < deadline, f"{self.timeout_s} s without: {what}; load {self.engine.load()}"
            await asyncio.sleep(POLL_S)

    def idle(self) -> bool:
        """Nothing runs, waits or is reserved, and all memory is free or cached."""
        load = self.engine.load()
        return (
            load.running == load.waiting == load.head_demand == load.queued_demand == 0
            and load.free + load.cached == load.capacity
        )

    async def settle(self) -> None:
        """End what a test left, then check that memory is back and nothing broke the contract."""
        live = [key for key, stream in self.listener.streams.items() if stream.finish is None]
        for key in live:
            self.engine.cancel(key)
        await self.finished(*(self.listener.streams[key] for key in live))
        await self.eventually(self.idle, "an idle engine")
        await self.engine.check_integrity()
        assert self.listener.problems == []
        assert self.listener.failures == []
        self.listener.streams.clear()
        self.listener.hooks.clear()


def conserved(rig: Rig) -> bool:
    """Whether the newest load adds up."""
    load = rig.engine.load()
    parts = (load.used, load.cached, load.free, load.reserved, load.running, load.waiting)
    return (
        load.used + load.cached + load.free + load.reserved == load.capacity == rig.info.capacity
        and min(parts) >= 0
        and load.head_demand <= load.queued_demand
    )


def watch_loads(rig: Rig) -> list[EngineLoad]:
    """The loads at every step from now on."""
    loads: list[EngineLoad] = []
    rig.listener.hooks.append(lambda: loads.append(rig.engine.load()))
    return loads


def watch_conservation(rig: Rig) -> list[str]:
    """Look at the load at every step from now on; returns the list of what didn't add up."""
    wrong: list[str] = []
    rig.listener.hooks.append(lambda: None if conserved(rig) else wrong.append(str(rig.engine.load())))
    return wrong


@dataclass
class MovePair:
    """Two started engines whose data planes reach each other."""

    source: Rig
    destination: Rig
    reservation_s: float
    """A deadline of reservations that a slow move doesn't reach."""
    short_reservation_s: float
    """One that a test can wait for."""
    headroom_tokens: int | None = None
    """How far a request may get while the destination answers; four pages, if it isn't said."""

    def reversed(self) -> "MovePair":
        """The other direction."""
        return replace(self, source=self.destination, destination=self.source)

    @property
    def headroom(self) -> int:
        """To reserve beyond what is there, before a freeze."""
        return self.headroom_tokens or 4 * self.source.info.page_size

    async def settle(self) -> None:
        """Both."""
        await self.source.settle()
        await self.destination.settle()


def movable(rig: Rig) -> MovableEngine:
    """The rig's engine, which must be movable."""
    assert isinstance(rig.engine, MovableEngine)
    return rig.engine


def layout_of(rig: Rig) -> KvLayout:
    """Its layout, which a movable engine has."""
    assert rig.info.layout is not None
    return rig.info.layout


async def starve(rig: Rig) -> MoveKey:
    """Promise nearly all free memory away, to nobody; returns the reservation, to be aborted."""
    key, left = MoveKey(f"starve-{next(_numbers)}", 1, 1), rig.info.page_size
    while True:
        load = rig.engine.load()
        try:
            slots = max(1, load.free + load.cached - left)
            await movable(rig).reserve(key, layout_of(rig), (), slots, 10 * rig.timeout_s)
        except MoveRefused as refused:
            if refused.refusal is not Refusal.NO_ROOM or slots == 1:
                raise
            # What runs goes on taking memory meanwhile.
            left *= 2
        else:
            return key


@dataclass
class Mover:
    """The mesh's part of one move, step by step."""

    pair: MovePair
    request: EngineRequest
    """As it runs at the source."""
    next: int = 0
    begun: MoveBegun | None = None
    reserved: Reserved | None = None
    frozen: FrozenRequest | None = None

    @property
    def key(self) -> MoveKey:
        request_id, attempt, hop = self.request.key
        return MoveKey(request_id, attempt, hop + 1)

    async def begin(self) -> MoveBegun:
        self.begun = await movable(self.pair.source).begin_move(self.key)
        return self.begun

    async def reserve(self, slots: int | None = None, deadline_s: float | None = None) -> Reserved:
        """Room for what is there and two pages more, or for so many tokens; with 0 slots for the state only."""
        assert self.begun is not None
        known = () if slots == 0 else self.begun.tokens
        room = len(known) + min(2 * self.pair.source.info.page_size, self.begun.growth_max)
        before = self.reserved
        self.reserved = await movable(self.pair.destination).reserve(
            self.key,
            layout_of(self.pair.source),
            known,
            room if slots is None else slots,
            self.pair.reservation_s if deadline_s is None else deadline_s,
        )
        assert self.reserved.slots >= (room if slots is None else slots)
        assert before is None or before.targets in (self.reserved.targets, ())
        self.next = max(self.next, self.reserved.cached)
        return self.reserved

    async def copy(self) -> DeltaSent:
        """One round."""
        assert self.reserved is not None
        sent = await movable(self.pair.source).send_delta(self.key, self.next, self.reserved)
        assert self.next == sent.start <= sent.end <= self.reserved.slots
        assert (sent.byte_count > 0) == (sent.end > sent.start)
        self.next = sent.end
        return sent

    async def freeze(self, *, state_only: bool = False) -> FrozenRequest:
        """Out of the batch, and the rest sent."""
        assert self.begun is not None
        reserved = None if state_only else self.reserved
        frozen = self.frozen = await movable(self.pair.source).freeze(self.key, self.next, reserved)
        output = frozen.output
        # Everything up to the freeze has reached the listener by now.
        stream = self.pair.source.listener.streams[self.request.key]
        assert tuple(stream.tokens) == output[stream.first :]
        if reserved is None or not self.begun.tokens:
            assert (frozen.computed, frozen.delta) == (0, None)
        else:
            assert frozen.computed == len(self.request.prompt) + len(output) - 1
            assert frozen.delta is not None
            assert (frozen.delta.start, frozen.delta.end) == (self.next, frozen.computed)
        assert frozen.frozen_ns > 0
        return frozen

    def arrival(self) -> EngineRequest:
        """The request as it will run at the destination."""
        assert self.frozen is not None
        old = self.request
        return EngineRequest(self.key.destination, old.prompt, self.frozen.output, old.sampling, old.priority)

    async def commit(self) -> tuple[EngineRequest, Stream]:
        """The request and its stream at the destination."""
        assert self.frozen is not None
        request = self.arrival()
        stream = self.pair.destination.listener.open(request.key, len(request.output))
        try:
            committed = await movable(self.pair.destination).commit(
                self.key, self.frozen, request, self.pair.destination.timeout_s
            )
        except BaseException:
            del self.pair.destination.listener.streams[request.key]
            raise
        assert committed.runnable_ns >= self.frozen.frozen_ns
        return request, stream

    async def release(self) -> None:
        await movable(self.pair.source).release(self.key)
        del self.pair.source.listener.streams[self.request.key]

    async def resume(self, attempt: int | None = None) -> EngineRequest:
        """Give up: abort there, go on here."""
        await movable(self.pair.destination).abort(self.key)
        old = self.request
        now = old.key if attempt is None else old.key._replace(attempt=attempt)
        streams = self.pair.source.listener.streams
        # Tokens of the old attempt may still come until it returns.
        streams[now] = streams[old.key]
        await movable(self.pair.source).resume(self.key, now.attempt)
        if now != old.key:
            del streams[old.key]
        return EngineRequest(now, old.prompt, old.output, old.sampling, old.priority)

    async def run(self) -> tuple[EngineRequest, Stream]:
        """The whole move; the request and its stream at the destination."""
        await self.begin()
        await self.reserve()
        await self.copy()
        return await self.finish()

    async def finish(self) -> tuple[EngineRequest, Stream]:
        """From a live round on: freeze, commit, release."""
        assert self.begun is not None
        await self.reserve(max(self.next, len(self.begun.tokens)) + self.pair.headroom)
        await self.freeze()
        arrived = await self.commit()
        await self.release()
        return arrived

    async def run_state_only(self) -> tuple[EngineRequest, Stream]:
        """The same without KV."""
        await self.begin()
        await self.reserve(0)
        await self.freeze(state_only=True)
        arrived = await self.commit()
        await self.release()
        return arrived
