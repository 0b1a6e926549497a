"""Units come and go one by one, really, and all or nothing."""

import errno
import mmap
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from meshift.kv_memory.arena import Arena, ArenaExhausted, CpuArena  # noqa: E402
from meshift.kv_memory.arena.base import runs  # noqa: E402
from meshift.kv_memory.arena.cpu import give_back, resident_bytes  # noqa: E402
from meshift.kv_memory.arena.cuda import CudaArena, CudaDriverError, CudaVirtualMemory  # noqa: E402

UNITS, UNIT_BYTES = 12, 2 * mmap.PAGESIZE


class FakeDriver:
    """As much of `cuda.bindings.driver` as the arena uses; it keeps the books and fails when told to."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED="pinned")
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE="device")
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE="both")
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM="minimum")

    def __init__(self) -> None:
        self.reserved: dict[int, int] = {}
        self.created: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.readable: set[int] = set()
        self.handles = 0
        self.synchronized = 0
        self.failing = ("", 0)
        """A call, and after how many of them it fails."""

    def CUmemAllocationProp(self) -> Any:  # noqa: N802
        return SimpleNamespace(type=None, location=SimpleNamespace(type=None, id=None))

    def CUmemAccessDesc(self) -> Any:  # noqa: N802
        return SimpleNamespace(flags=None, location=SimpleNamespace(type=None, id=None))

    def _fails(self, call: str) -> bool:
        name, left = self.failing
        if name == call:
            self.failing = (name, left - 1)
        return name == call and left <= 0

    def cuMemGetAllocationGranularity(self, properties: Any, flags: Any) -> tuple[int, int]:  # noqa: N802
        assert (properties.type, properties.location.type, properties.location.id) == ("pinned", "device", 3)
        return 0, mmap.PAGESIZE

    def cuMemAddressReserve(self, size: int, *zeros: int) -> tuple[int, int]:  # noqa: N802
        if self._fails("reserve"):
            return 2, 0
        self.reserved[1 << 40] = size
        return 0, 1 << 40

    def cuMemAddressFree(self, address: int, size: int) -> tuple[int]:  # noqa: N802
        assert self.reserved.pop(address) == size
        assert not self.mapped
        return (0,)

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> tuple[int, int]:  # noqa: N802
        if self._fails("create"):
            return 2, 0
        self.handles += 1
        self.created[self.handles] = size
        return 0, self.handles

    def cuMemRelease(self, handle: int) -> tuple[int]:  # noqa: N802
        del self.created[handle]
        return (0,)

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> tuple[int]:  # noqa: N802
        if self._fails("map"):
            return (2,)
        assert address not in self.mapped
        assert self.created[handle] == size
        self.mapped[address] = handle
        return (0,)

    def cuMemSetAccess(self, address: int, size: int, access: Any, count: int) -> tuple[int]:  # noqa: N802
        if self._fails("access"):
            return (2,)
        assert access[0].flags == "both"
        self.readable.add(address)
        return (0,)

    def cuMemUnmap(self, address: int, size: int) -> tuple[int]:  # noqa: N802
        del self.mapped[address]
        self.readable.discard(address)
        return (0,)

    def cuCtxSynchronize(self) -> tuple[int]:  # noqa: N802
        self.synchronized += 1
        return (0,)


@pytest.fixture(params=["cpu", "cpu, populated", "cuda"])
def arena(request: pytest.FixtureRequest) -> Arena:
    if request.param == "cuda":
        return CudaArena(CudaVirtualMemory(3, FakeDriver()), UNITS, UNIT_BYTES)
    return CpuArena(UNITS, UNIT_BYTES, populate="populated" in request.param)


def test_life(arena: Arena) -> None:
    arena.commit([0, 5, 6])
    arena.commit(np.array([11]))
    assert arena.committed == 4
    assert arena.is_committed([0, 1, 11]).tolist() == [True, False, True]
    assert (arena.addresses([0, 3]) - arena.base).tolist() == [0, 3 * UNIT_BYTES]
    arena.release([6, 0])
    assert np.flatnonzero(arena.is_committed(range(UNITS))).tolist() == [5, 11]
    arena.commit(range(5))
    arena.close()
    arena.close()


def test_refusals(arena: Arena) -> None:
    arena.commit([1, 2])
    for wrong in ([2, 3], [4, 4], [UNITS], [-1]):
        with pytest.raises((ValueError, IndexError)):
            arena.commit(wrong)
    for wrong in ([2, 3], [1, 1], [UNITS]):
        with pytest.raises((ValueError, IndexError)):
            arena.release(wrong)
    assert np.flatnonzero(arena.is_committed(range(UNITS))).tolist() == [1, 2]
    arena.close()


def test_random_units_against_a_set(arena: Arena) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice, backed = random.Random(seed), set[int]()
    for _ in range(200):
        giving = dice.random() < 0.5
        candidates = sorted(backed if giving else set(range(UNITS)) - backed)
        chosen = dice.sample(candidates, dice.randint(0, len(candidates)))
        (arena.release if giving else arena.commit)(chosen)
        backed = backed - set(chosen) if giving else backed | set(chosen)
        assert set(np.flatnonzero(arena.is_committed(range(UNITS))).tolist()) == backed
    arena.close()


# ---- in the process's memory


@pytest.mark.parametrize("populate", [False, True])
def test_memory_really_comes_and_goes(populate: bool) -> None:
    arena = CpuArena(64, UNIT_BYTES, populate=populate)
    assert arena.resident_bytes() == 0
    arena.commit(range(64))
    assert arena.resident_bytes() == (64 * UNIT_BYTES if populate else 0)
    arena.bytes.fill_(7)
    assert arena.resident_bytes() == 64 * UNIT_BYTES
    gone = [*range(0, 20, 2), *range(40, 64)]
    arena.release(gone)
    assert arena.resident_bytes() == (64 - len(gone)) * UNIT_BYTES
    content = arena.bytes.view(64, UNIT_BYTES)
    kept = [unit for unit in range(64) if unit not in gone]
    assert bool((content[kept] == 7).all())
    arena.commit(gone)
    assert not bool(content[gone].any())
    arena.close()


def test_a_failed_commit_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = CpuArena(UNITS, UNIT_BYTES, populate=True)
    advise, calls = arena._advise, []

    def failing(advice: int, first: int, count: int) -> None:
        calls.append(first)
        if len(calls) == 2:
            raise OSError(errno.ENOMEM, "no memory")
        advise(advice, first, count)

    monkeypatch.setattr(arena, "_advise", failing)
    with pytest.raises(ArenaExhausted, match="no memory"):
        arena.commit([0, 1, 4, 9])
    assert arena.committed == 0
    assert arena.resident_bytes() == 0
    assert calls == [0, 4, 0, 4]


def test_a_kernel_that_cannot_populate(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = CpuArena(UNITS, UNIT_BYTES, populate=True)

    def refusing(advice: int, first: int, count: int) -> None:
        raise OSError(errno.EINVAL, "what?")

    monkeypatch.setattr(arena, "_advise", refusing)
    arena.commit([1, 3])
    assert arena.committed == 2


def test_more_addresses_than_there_are() -> None:
    with pytest.raises(ArenaExhausted, match="reserved"):
        CpuArena(1 << 10, 1 << 40)
    with pytest.raises(ValueError, match="pages"):
        CpuArena(1, mmap.PAGESIZE + 1)
    with pytest.raises(ValueError, match="0 units"):
        CpuArena(0, mmap.PAGESIZE)


# ---- on a GPU


def test_handles_and_mappings() -> None:
    driver = FakeDriver()
    arena = CudaArena(CudaVirtualMemory(3, driver), UNITS, UNIT_BYTES)
    assert driver.reserved == {1 << 40: UNITS * UNIT_BYTES}
    arena.commit([2, 7])
    assert set(driver.mapped) == driver.readable == set(arena.addresses([2, 7]).tolist())
    arena.release([2])
    assert driver.synchronized == 1
    assert set(driver.mapped) == set(arena.addresses([7]).tolist())
    assert len(driver.created) == 1
    arena.close()
    assert not driver.created
    assert not driver.reserved


@pytest.mark.parametrize("call", ["create", "map", "access"])
def test_a_gpu_that_is_full(call: str) -> None:
    driver = FakeDriver()
    arena = CudaArena(CudaVirtualMemory(3, driver), UNITS, UNIT_BYTES)
    arena.commit([0])
    driver.failing = (call, 2)
    with pytest.raises(ArenaExhausted, match="no memory for 4 units"):
        arena.commit([1, 2, 3, 4])
    assert set(driver.mapped) == {arena.base}
    assert len(driver.created) == 1
    assert arena.committed == 1
    driver.failing = ("", 0)
    arena.commit([1, 2, 3, 4])
    arena.close()


def test_no_addresses_on_a_gpu() -> None:
    driver = FakeDriver()
    driver.failing = ("reserve", 0)
    with pytest.raises(ArenaExhausted, match="reserved"):
        CudaArena(CudaVirtualMemory(3, driver), UNITS, UNIT_BYTES)
    with pytest.raises(ValueError, match="multiple"):
        CudaArena(CudaVirtualMemory(3, FakeDriver()), UNITS, UNIT_BYTES + 1)
    assert "cuMemCreate: 2" in str(CudaDriverError("cuMemCreate", "2"))


def test_whole_pages_are_given_back() -> None:
    page = mmap.PAGESIZE
    memory = torch.ones(8 * page, dtype=torch.uint8)
    first = -memory.data_ptr() % page
    begin = memory.data_ptr() + first
    # Nothing within a page but all of it is.
    give_back(begin + 1, page - 1)
    assert memory.all()
    give_back(begin + page + 1, 3 * page)
    inside = memory[first:]
    # Before they are read, which maps a page of zeros.
    assert resident_bytes(begin + 2 * page, 2 * page) == 0
    assert inside[: 2 * page].all()
    assert not inside[2 * page : 4 * page].any()
    assert inside[4 * page :].all()
    with pytest.raises(OSError, match="madvise"):
        give_back(2**60, 4 * page)


def test_resident_bytes_of_a_part() -> None:
    page = mmap.PAGESIZE
    with mmap.mmap(-1, 8 * page) as area:
        base = np.frombuffer(area, np.uint8).ctypes.data
        assert resident_bytes(base, 8 * page) == 0
        area[3 * page] = 1
        assert resident_bytes(base, 8 * page) == page
        assert resident_bytes(base + 3 * page + 100, 50) == 50
        assert resident_bytes(base + 2 * page + 100, page) == 100
        assert resident_bytes(base, 3 * page) == resident_bytes(base, 0) == 0


def test_runs() -> None:
    assert runs(np.array([5, 3, 4, 9, 0])) == [(0, 1), (3, 3), (9, 1)]
    assert runs(np.array([], np.int64)) == []
