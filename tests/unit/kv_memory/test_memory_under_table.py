"""The block table with real memory under it: what requests have written stays theirs, whatever comes and goes."""

import random
from dataclasses import dataclass, field

import pytest

pytest.importorskip("torch")

from meshift.kv_memory.arena import CpuArena
from meshift.kv_memory.block_table import BlockTable, OutOfPages
from meshift.kv_memory.stacking import OS_PAGE_BYTES

PAGES_MAX, GROUPS = 12, 2
SEQUENCES, STEPS = 60, 25


@dataclass
class Request:
    """Its pages, in order, and the byte that all of them are full of."""

    stamp: int
    pages: list[int] = field(default_factory=list)


class Memory:
    """One instance: a table, an arena a group, and who has what."""

    def __init__(self, pages: int) -> None:
        self.table = BlockTable(PAGES_MAX, pages)
        self.arenas = [CpuArena(PAGES_MAX, OS_PAGE_BYTES) for _ in range(GROUPS)]
        for arena in self.arenas:
            arena.commit(range(pages))
        self.requests: list[Request] = []

    def write(self, request: Request, pages: list[int]) -> None:
        for page in pages:
            for arena in self.arenas:
                arena.bytes[page * OS_PAGE_BYTES : (page + 1) * OS_PAGE_BYTES] = request.stamp
        request.pages += pages

    def grow_request(self, request: Request, count: int) -> None:
        try:
            pages = self.table.allocate(count).tolist()
        except OutOfPages:
            return
        self.write(request, pages)

    def end(self, request: Request) -> None:
        self.table.free(request.pages)
        self.requests.remove(request)

    def resize(self, dice: random.Random) -> None:
        counts = self.table.counts
        if dice.random() < 0.5:
            gone = self.table.shrink(dice.randint(0, counts.free))
            for arena in self.arenas:
                arena.release(gone)
        else:
            back = self.table.grow(dice.randint(0, PAGES_MAX - counts.capacity))
            for arena in self.arenas:
                arena.commit(back)

    def check(self) -> None:
        self.table.check_integrity()
        held = [page for request in self.requests for page in request.pages]
        assert len(held) == len(set(held)) == self.table.counts.used
        for arena in self.arenas:
            assert arena.committed == self.table.counts.capacity
            for request in self.requests:
                for page in request.pages:
                    unit = arena.bytes[page * OS_PAGE_BYTES : (page + 1) * OS_PAGE_BYTES]
                    assert int(unit.min()) == int(unit.max()) == request.stamp


def move(source: Memory, destination: Memory, request: Request, dice: random.Random) -> None:
    """Reserve, copy, and then commit or give up."""
    try:
        promised = destination.table.reserve("move", len(request.pages), deadline_s=1.0).tolist()
    except OutOfPages:
        return
    for page, other in zip(request.pages, promised, strict=True):
        for theirs, ours in zip(source.arenas, destination.arenas, strict=True):
            unit = theirs.bytes[page * OS_PAGE_BYTES : (page + 1) * OS_PAGE_BYTES]
            ours.bytes[other * OS_PAGE_BYTES : (other + 1) * OS_PAGE_BYTES] = unit
    # Others come and go at the destination meanwhile; what is promised stays.
    destination.resize(dice)
    if dice.random() < 0.3:
        destination.table.cancel("move")
        return
    assert destination.table.claim("move").tolist() == promised
    source.end(request)
    destination.requests.append(Request(request.stamp, promised))


def test_random_sequences() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    for _ in range(SEQUENCES):
        memories = [Memory(dice.randint(1, PAGES_MAX)) for _ in range(2)]
        for number in range(STEPS):
            memory, other = dice.sample(memories, 2)
            chosen = dice.choice(memory.requests) if memory.requests else None
            action = dice.randrange(5)
            if action == 0 or chosen is None:
                memory.requests.append(Request(number + 1))
                memory.grow_request(memory.requests[-1], dice.randint(1, 4))
            elif action == 1:
                memory.grow_request(chosen, 1)
            elif action == 2:
                memory.end(chosen)
            elif action == 3:
                move(memory, other, chosen, dice)
            else:
                memory.resize(dice)
            for one in memories:
                one.check()
        for memory in memories:
            for arena in memory.arenas:
                arena.close()


@pytest.mark.soak
def test_many_random_sequences() -> None:
    for _ in range(100):
        test_random_sequences()
