"""How often a drain tries to move what doesn't move."""

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from meshift.schemas.identity import Owner, RequestKey
from meshift.schemas.moves import MoveMode, MoveOrder, MoveOutcome, MoveRefusal, MoveReport
from meshift.services.worker.moves.draining import DOUBLINGS_MAX, Draining
from meshift.services.worker.options import WorkerOptions

HERE = Owner("here", 1)


class Refusing:
    """Refuses all moves, for a reason."""

    def __init__(self, refusal: MoveRefusal) -> None:
        self.refusal = refusal
        self.tried_s: dict[str, list[float]] = {}
        self.now_s = 0.0

    async def begin(self, order: MoveOrder, *, fallback: bool = False) -> MoveReport:
        self.tried_s.setdefault(order.request_id, []).append(self.now_s)
        return MoveReport(
            request_id=order.request_id,
            attempt=1,
            hop=1,
            source=HERE,
            destination=None,
            mode=MoveMode.LIVE,
            phase="refused",
            outcome=MoveOutcome.REFUSED,
            refusal=self.refusal,
        )

    def can_move(self, record: Any) -> bool:
        return True

    def running(self) -> int:
        return 0


async def drain(moves: Refusing, records: list[Any], ticks: int) -> Draining:
    """A tick each 0.1 s."""
    context: Any = SimpleNamespace(
        owner=HERE, requests=records, options=WorkerOptions(drain_retry_s=1.0), now_s=lambda: moves.now_s
    )
    draining = Draining(context, moves)
    for number in range(ticks):
        moves.now_s = number / 10
        draining.tick(moves.now_s, 1e9)
        await settled(draining)
    return draining


async def settled(draining: Draining) -> None:
    while draining._tasks:
        await asyncio.sleep(0)


def record(name: str) -> Any:
    return SimpleNamespace(key=RequestKey(name, 1, 0), over=False, end=0, base=0, known_tokens=4)


def pauses(times_s: list[float]) -> list[float]:
    return [round(later - earlier, 1) for earlier, later in itertools.pairwise(times_s)]


@pytest.mark.parametrize(("refusal", "first_s"), [(MoveRefusal.NO_DESTINATION, 1.0), (MoveRefusal.BUSY, 0.3)])
async def test_pauses_grow_to_a_bound(refusal: MoveRefusal, first_s: float) -> None:
    moves = Refusing(refusal)
    await drain(moves, [record("a"), record("b")], 400)
    for times_s in moves.tried_s.values():
        found = pauses(times_s)
        assert found[0] == first_s
        assert found == sorted(found)
        assert found[-1] == found[DOUBLINGS_MAX] == (8.0 if first_s == 1.0 else 2.0)
    assert len(moves.tried_s["a"]) < 25


async def test_what_has_left_is_forgotten() -> None:
    moves, records = Refusing(MoveRefusal.NO_ROOM), [record("a")]
    draining = await drain(moves, records, 50)
    assert draining.status(1, 9.0).blocked.startswith("1 of 1 requests: no_room")
    records.clear()
    draining.tick(moves.now_s + 1.0, 1e9)
    records.append(record("a"))
    moves.now_s += 1.1
    draining.tick(moves.now_s, 1e9)
    await settled(draining)
    assert moves.tried_s["a"][-1] == moves.now_s, "its pause outlived it"
