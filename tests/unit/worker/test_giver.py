"""The worker's giver, with moves that the test ends."""

import asyncio
from array import array
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, cast

from meshift.backends.base import ClassUsage, Engine, EngineLoad
from meshift.schemas.base import pack_tokens
from meshift.schemas.identity import FrontendRef, Owner, RequestKey
from meshift.schemas.instances import MovePair
from meshift.schemas.moves import MoveMode, MoveOrder, MoveOutcome, MoveRefusal, MoveReport, MovesReply
from meshift.schemas.requests import Finish, FinishReason, Priority, Sampling
from meshift.services.simulation import virtual_time
from meshift.services.worker.giver import Giver
from meshift.services.worker.options import WorkerOptions
from meshift.services.worker.requests import RequestRecord

HERE, THERE = Owner("a", 1), Owner("b", 1)


def record(name: str, prompt: int, output: int = 1, **changes: Any) -> RequestRecord:
    made = RequestRecord(
        RequestKey(name, 1, 0),
        FrontendRef("f", 1),
        pack_tokens([1] * prompt),
        Sampling(max_new_tokens=99),
        Priority(),
        0,
    )
    made.output = array("i", [1] * output)
    for key, value in changes.items():
        setattr(made, key, value)
    return made


@dataclass
class FakeEngine:
    """Knows the size of each request: what it is told, else all of one that has given a token."""

    requests: list[RequestRecord]
    capacity: int = 1000
    head_demand: int = 0
    sizes: dict[str, int | None] = field(default_factory=dict)

    def load(self) -> EngineLoad:
        used = sum(item.known_tokens for item in self.requests if item.output)
        running = sum(bool(item.output) for item in self.requests)
        waiting = len(self.requests) - running
        free = self.capacity - used
        usages = (ClassUsage(0, running, used),)
        return EngineLoad(self.capacity, used, 0, free, 0, running, waiting, self.head_demand, 0, 0, usages)

    def held_tokens(self, key: RequestKey) -> int | None:
        if key.request_id in self.sizes:
            return self.sizes[key.request_id]
        item = next(item for item in self.requests if item.key == key)
        return item.known_tokens if item.output else None


class FakeMoves:
    """Keeps the orders until the test says what becomes of them."""

    def __init__(self, requests: list[RequestRecord]) -> None:
        self._requests = requests
        self.orders: list[MoveOrder] = []
        self._ends: list[asyncio.Future[MoveReport]] = []

    def begin(self, order: MoveOrder) -> Awaitable[MoveReport]:
        self.orders.append(order)
        self._find(order.request_id).moving = True
        self._ends.append(asyncio.get_running_loop().create_future())
        return self._ends[-1]

    def can_move(self, record: RequestRecord) -> bool:
        return not record.moving

    def describe(self) -> MovesReply:
        return MovesReply(owner=HERE)

    async def end(self, outcome: MoveOutcome, refusal: MoveRefusal | None = None) -> None:
        order = self.orders[len(self.orders) - 1]
        moved = self._find(order.request_id)
        if outcome is MoveOutcome.MOVED:
            self._requests.remove(moved)
        moved.moving = False
        self._ends[-1].set_result(
            MoveReport(
                request_id=order.request_id, attempt=1, hop=1, source=HERE, destination=THERE, mode=MoveMode.LIVE,
                phase="ended", outcome=outcome, refusal=refusal,
            )
        )  # fmt: skip
        await asyncio.sleep(0.001)

    def _find(self, name: str) -> RequestRecord:
        return next(item for item in self._requests if item.key.request_id == name)

    @property
    def names(self) -> list[str]:
        return [order.request_id for order in self.orders]


class Rig:
    """An overloaded instance that holds these."""

    def __init__(self, *requests: RequestRecord, engine: FakeEngine | None = None, **options: Any) -> None:
        self.requests = list(requests)
        self.engine = engine or FakeEngine(self.requests)
        self.engine.requests = self.requests
        self.moves = FakeMoves(self.requests)
        self.giver = Giver(HERE, cast(Engine, self.engine), self.moves, self.requests, WorkerOptions(**options))

    def pair(self, **changes: Any) -> None:
        fields: dict[str, Any] = {
            "scheduler_id": "s", "incarnation": 1, "source": HERE, "destination": THERE, "tokens_max": 1000,
            "until_freeness": 1000.0, "ttl_s": 0.5,
        }  # fmt: skip
        self.giver.on_pair(MovePair(**fields | changes))


def test_it_gives_the_shortest_one_after_another_while_the_pair_holds() -> None:
    async def main() -> None:
        rig = Rig(record("long", 300), record("short", 100), record("middle", 200))
        rig.pair()
        assert rig.moves.names == ["short"], "one at a time"
        assert rig.moves.orders[0].destination == THERE
        assert rig.moves.orders[0].mode is MoveMode.LIVE
        await rig.moves.end(MoveOutcome.MOVED)
        assert rig.moves.names == ["short", "middle"]
        await asyncio.sleep(0.5)
        await rig.moves.end(MoveOutcome.MOVED)
        assert rig.moves.names == ["short", "middle"], "the pair's time is over"
        rig.pair()
        assert rig.moves.names == ["short", "middle", "long"]

    virtual_time.run(main())


def test_several_at_once_where_the_options_say_so() -> None:
    async def main() -> None:
        rig = Rig(record("a", 100), record("b", 200), record("c", 300), gives_max=2)
        rig.pair()
        assert rig.moves.names == ["a", "b"]

    virtual_time.run(main())


def test_it_stops_when_enough_has_gone() -> None:
    async def main() -> None:
        rig = Rig(record("a", 499), record("b", 399))
        rig.pair(until_freeness=50.0)
        assert rig.moves.names == [], "(1000 - 900) / 2 is enough"
        rig.engine.head_demand = 10
        rig.pair(until_freeness=50.0)
        assert rig.moves.names == ["b"]

    virtual_time.run(main())


def test_no_more_than_the_destination_has_room_for() -> None:
    async def main() -> None:
        rig = Rig(record("a", 100), record("b", 110), record("c", 400))
        rig.pair(tokens_max=250)
        assert rig.moves.names == ["a"]
        await rig.moves.end(MoveOutcome.MOVED)
        assert rig.moves.names == ["a", "b"]
        await rig.moves.end(MoveOutcome.MOVED)
        assert rig.moves.names == ["a", "b"]

    virtual_time.run(main())


def test_a_refusal_of_the_destination_ends_the_pair_and_one_of_the_request_doesn_t() -> None:
    async def main() -> None:
        rig = Rig(record("a", 100), record("b", 200), record("c", 300))
        rig.pair()
        await rig.moves.end(MoveOutcome.STAYED, MoveRefusal.NO_ROOM)
        assert rig.moves.names == ["a"]
        rig.pair()
        assert rig.moves.names == ["a", "b"]
        rig.requests[1].finish = Finish(reason=FinishReason.LENGTH)
        await rig.moves.end(MoveOutcome.ENDED, MoveRefusal.ENDED)
        assert rig.moves.names == ["a", "b", "c"]

    virtual_time.run(main())


def test_where_a_request_failed_to_go_it_is_given_again_only_later() -> None:
    async def main() -> None:
        rig = Rig(record("a", 100), give_retry_s=3.0)
        rig.pair()
        await rig.moves.end(MoveOutcome.STAYED, MoveRefusal.NO_ROOM)
        rig.pair()
        assert rig.moves.names == ["a"]
        rig.pair(destination=Owner("c", 1))
        assert rig.moves.names == ["a", "a"], "elsewhere at once"
        await rig.moves.end(MoveOutcome.REFUSED, MoveRefusal.BUSY)
        assert rig.moves.names == ["a", "a", "a"], "a move that wasn't begun says nothing of the destination"
        await rig.moves.end(MoveOutcome.STAYED, MoveRefusal.BUSY)
        assert len(rig.moves.names) == 3, "the pair holds, but not for this one"
        await asyncio.sleep(3.0)
        rig.pair()
        assert len(rig.moves.names) == 4

    virtual_time.run(main())


def test_the_newest_scheduler_is_obeyed_and_only_here() -> None:
    async def main() -> None:
        rig = Rig(record("a", 100), record("b", 200))
        rig.pair(source=Owner("a", 2))
        assert rig.moves.names == []
        rig.pair(incarnation=5, until_freeness=0.0)
        rig.pair(incarnation=4)
        assert rig.moves.names == [], "an older scheduler's pair"
        rig.pair(incarnation=6)
        assert rig.moves.names == ["a"]
        rig.giver.stop()
        await rig.moves.end(MoveOutcome.MOVED)
        rig.pair(incarnation=7)
        assert rig.moves.names == ["a"]

    virtual_time.run(main())


def test_one_that_waits_goes_as_it_is_the_first_that_fits() -> None:
    async def main() -> None:
        requests = [record("runs", 100), record("head", 200, 0), record("next", 50, 0), record("prefill", 10, 0)]
        engine = FakeEngine(requests, sizes={"runs": 101, "head": 0, "next": 0, "prefill": None})
        rig = Rig(*requests, engine=engine)
        rig.pair(waiting=True, tokens_max=49)
        assert rig.moves.names == []
        rig.pair(waiting=True, tokens_max=300)
        assert rig.moves.names == ["head"]
        await rig.moves.end(MoveOutcome.MOVED)
        assert rig.moves.names == ["head"], "the next one is the next round's"

    virtual_time.run(main())


def test_one_that_a_head_blocks_goes_where_the_head_has_no_room() -> None:
    async def main() -> None:
        requests = [record("head", 200, 0), record("next", 50, 0)]
        rig = Rig(*requests, engine=FakeEngine(requests, sizes={"head": 0, "next": 0}))
        rig.pair(waiting=True, tokens_max=199)
        assert rig.moves.names == ["next"]

    virtual_time.run(main())


def test_one_in_its_prefill_is_left_as_is_one_that_has_ended() -> None:
    async def main() -> None:
        rig = Rig(record("a", 100, 0), record("b", 200), record("c", 5, finish=Finish(reason=FinishReason.LENGTH)))
        rig.pair()
        assert rig.moves.names == ["b"]

    virtual_time.run(main())


def test_one_that_came_a_moment_ago_goes_last() -> None:
    async def main() -> None:
        await asyncio.sleep(10)
        rig = Rig(record("a", 100, came_s=7.0), record("b", 200, came_s=4.0))
        rig.pair()
        assert rig.moves.names == ["b"]

    virtual_time.run(main())
