"""Gives requests away while the scheduler says so: which ones is decided here, by the policy, for the requests that are
here now; how one moves is the affair of `meshift.services.worker.moves`."""

import asyncio
from collections.abc import Awaitable, Iterable

from meshift.backends.base import Engine, EngineLoad
from meshift.schemas.identity import Owner, RequestKey
from meshift.schemas.instances import MovePair
from meshift.schemas.moves import MoveOrder, MoveOutcome, MoveRefusal, MoveReport
from meshift.services.worker.moves.base import Moves
from meshift.services.worker.options import WorkerOptions
from meshift.services.worker.policy.choice import (
    Choice,
    ChoiceSettings,
    Movable,
    SourceLoad,
    choose_request,
    choose_waiting,
)
from meshift.services.worker.policy.virtual_usage import class_loads
from meshift.services.worker.requests import RequestRecord

NEXT_REQUEST = frozenset({MoveRefusal.ENDED, MoveRefusal.UNKNOWN, MoveRefusal.BUSY, MoveRefusal.PREEMPTED})
"""Refusals that say something of the request only; after others the pair is over."""


class Giver:
    """Of one worker."""

    def __init__(
        self,
        owner: Owner,
        engine: Engine,
        moves: Moves,
        requests: Iterable[RequestRecord],
        options: WorkerOptions,
    ) -> None:
        self._owner = owner
        self._engine = engine
        self._moves = moves
        self._requests = requests
        self._options = options
        self._choice = ChoiceSettings(options.give_cooldown_s, options.give_growth_tokens, options.give_retry_s)
        self._pair: MovePair | None = None
        self._until_s = 0.0
        self._left = 0
        """Tokens that the destination still has room for."""
        self._leaving: dict[RequestKey, int] = {}
        """Tokens of what is on its way."""
        self._failed: dict[tuple[str, Owner], float] = {}
        """When a move of that request to that destination last came to nothing; in order of time."""
        self._incarnation = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = False

    def on_pair(self, pair: MovePair) -> None:
        """The scheduler pairs this instance with a destination. One meant for another incarnation, or of an older
        scheduler, is ignored."""
        if pair.source != self._owner or pair.incarnation < self._incarnation or self._stopped:
            return
        self._incarnation = pair.incarnation
        self._pair = pair
        self._until_s = self._now_s() + pair.ttl_s
        self._left = pair.tokens_max
        self._go_on()

    def stop(self) -> None:
        """Begin nothing more; what is under way is not the giver's."""
        self._stopped = True
        self._pair = None

    def _go_on(self) -> None:
        while self._pair is not None and self._now_s() < self._until_s and len(self._leaving) < self._options.gives_max:
            choice = self._choose(self._pair)
            if choice.request is None:
                return
            self._give(choice.request, self._pair)

    def _choose(self, pair: MovePair) -> Choice:
        candidates = list(self._movables(pair.destination))
        if pair.waiting:
            return choose_waiting(candidates, self._left, self._now_s(), self._choice)
        load = self._engine.load()
        return choose_request(
            candidates,
            self._source_load(load),
            until_freeness=pair.until_freeness,
            tokens_max=self._left,
            now_s=self._now_s(),
            usage=self._options.virtual_usage,
            settings=self._choice,
        )

    def _movables(self, destination: Owner) -> Iterable[Movable]:
        for record in self._requests:
            if record.over or not self._moves.can_move(record):
                continue
            tokens = self._engine.held_tokens(record.key)
            if tokens is not None:
                yield Movable(
                    key=record.key,
                    execution=record.priority.execution,
                    tokens=tokens,
                    moved_s=record.came_s,
                    failed_s=self._failed.get((record.key.request_id, destination)),
                    scheduling=record.priority.scheduling,
                    demand=record.known_tokens,
                )

    def _source_load(self, load: EngineLoad) -> SourceLoad:
        classes, _ = class_loads(load.usages, load.capacity, self._options.virtual_usage)
        return SourceLoad(
            capacity=load.capacity,
            used=load.used,
            reserved=load.reserved,
            head_demand=load.head_demand,
            running=load.running,
            classes=classes,
            leaving=sum(self._leaving.values()),
            leaving_requests=len(self._leaving),
        )

    def _give(self, request: Movable, pair: MovePair) -> None:
        self._leaving[request.key] = request.tokens
        self._left -= request.tokens if request.tokens else request.demand
        if pair.waiting:
            # The next head is the next round's, when its demand is known.
            self._pair = None
        order = MoveOrder(
            owner=self._owner,
            request_id=request.key.request_id,
            destination=pair.destination,
            deadline_s=self._options.give_deadline_s,
        )
        outcome = self._moves.begin(order)
        task = asyncio.get_running_loop().create_task(self._await(request.key, pair.destination, outcome))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _await(self, key: RequestKey, destination: Owner, outcome: Awaitable[MoveReport]) -> None:
        try:
            report = await outcome
        finally:
            self._leaving.pop(key, None)
        if report.outcome is MoveOutcome.STAYED:
            self._note_failure(key, destination)
        if report.outcome is not MoveOutcome.MOVED and report.refusal not in NEXT_REQUEST:
            self._pair = None
        self._go_on()

    def _note_failure(self, key: RequestKey, destination: Owner) -> None:
        now_s, name = self._now_s(), (key.request_id, destination)
        self._failed.pop(name, None)
        self._failed[name] = now_s
        while now_s - self._failed[oldest := next(iter(self._failed))] >= self._choice.retry_s and oldest != name:
            del self._failed[oldest]

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()
