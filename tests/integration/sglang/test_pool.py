"""Our pools by themselves, without an engine: SGLang's accesses go through them unchanged, every writer marks."""

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from meshift.backends.sglang.plugin.activate import LAYERS_PER_GROUP_VARIABLE
from meshift.kv_memory.arena import ArenaExhausted

pytestmark = [pytest.mark.sglang]

SLOTS, PAGE, LAYERS, HEADS, DIM = 96, 16, 6, 2, 32
START = 4
TOKEN_BYTES = 2 * HEADS * DIM * 4


@pytest.fixture(params=["plain", "arena"])
def pool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of a second stage: layers 4 to 9, four a group."""
    from meshift.backends.sglang.plugin.pool import pool_class

    if request.param == "arena":
        monkeypatch.setenv(LAYERS_PER_GROUP_VARIABLE, "4")
    else:
        monkeypatch.delenv(LAYERS_PER_GROUP_VARIABLE, raising=False)
    return make(pool_class())


def make(cls: Any, **changes: Any) -> Any:
    fields = {
        "size": SLOTS,
        "page_size": PAGE,
        "dtype": torch.float32,
        "head_num": HEADS,
        "head_dim": DIM,
        "layer_num": LAYERS,
        "device": "cpu",
        "enable_memory_saver": False,
        "start_layer": START,
        "end_layer": START + LAYERS,
    }
    return cls(**fields | changes)


def write(pool: Any, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    key, value = torch.randn(2, len(slots), HEADS, DIM)
    pool.set_kv_buffer(SimpleNamespace(layer_id=layer), slots, key, value)
    return key, value


def test_writes_reads_and_marks(pool: Any) -> None:
    slots = torch.tensor([3, 17, 95, 40])
    pool.dirty.add_reader("move")
    written = {layer: write(pool, layer, slots) for layer in range(START, START + LAYERS)}
    for layer, (key, value) in written.items():
        assert torch.equal(pool.get_key_buffer(layer)[slots], key)
        assert torch.equal(pool.get_value_buffer(layer)[slots], value)
    assert pool.dirty.swap("move").tolist() == sorted(slots.tolist())
    untouched = [slot for slot in range(SLOTS) if slot not in slots.tolist()]
    assert not any(bool(pool.get_key_buffer(layer)[untouched].any()) for layer in written)


def test_other_writers_mark_too(pool: Any) -> None:
    pool.dirty.add_reader("move")
    source, target = torch.tensor([5, 6]), torch.tensor([50, 61])
    key, _ = write(pool, START, source)
    copy = pool.get_cpu_copy(source)
    pool.dirty.swap("move")
    pool.load_cpu_copy(copy, target)
    assert torch.equal(pool.get_key_buffer(START)[target], key)
    assert pool.dirty.swap("move").tolist() == [50, 61]


def test_a_step_marks_what_it_wrote(pool: Any) -> None:
    pool.after_step(torch.tensor([1]))
    pool.dirty.add_reader("move")
    pool.after_step(torch.tensor([8, 2]))
    pool.after_step(None)
    pool.await_steps()
    assert pool.dirty.swap("move").tolist() == [2, 8]


def test_uncompiled_writes_are_the_same(pool: Any) -> None:
    slots = torch.tensor([9, 0, 33])
    key, value = write(pool, START + 1, slots)
    pool._compiled = False
    pool.set_kv_buffer(SimpleNamespace(layer_id=START + 2), slots, key, value)
    assert torch.equal(pool.get_key_buffer(START + 1)[slots], pool.get_key_buffer(START + 2)[slots])
    assert torch.equal(pool.get_value_buffer(START + 1)[slots], pool.get_value_buffer(START + 2)[slots])


def test_pages_of_an_arena(pool: Any) -> None:
    if not hasattr(pool, "arenas"):
        assert pool.give_up_pages([3]) == 0
        pytest.skip("nothing to give back")
    assert list(pool.arenas) == [1, 2]
    everything = torch.arange(SLOTS + PAGE)
    kept = {layer: write(pool, layer, everything) for layer in range(START, START + LAYERS)}
    unit_bytes = 4 * PAGE * TOKEN_BYTES
    assert pool.resident_bytes() == 2 * (SLOTS // PAGE + 1) * unit_bytes
    gone = np.array([2, 5])
    assert pool.give_up_pages(gone) == 2 * 2 * unit_bytes
    assert pool.resident_bytes() == 2 * (SLOTS // PAGE - 1) * unit_bytes
    left = torch.tensor([slot for slot in everything.tolist() if slot // PAGE not in (2, 5)])
    for layer, (key, value) in kept.items():
        assert torch.equal(pool.get_key_buffer(layer)[left], key[left])
        assert torch.equal(pool.get_value_buffer(layer)[left], value[left])
    pool.take_back_pages(gone)
    write(pool, START, torch.tensor([2 * PAGE]))
    for one, other in itertools.combinations(range(START, START + LAYERS), 2):
        assert not torch.equal(pool.get_key_buffer(one)[0], pool.get_key_buffer(other)[0])


def test_units_are_counted_exactly(pool: Any) -> None:
    if not hasattr(pool, "arenas"):
        assert pool.units() is None
        assert 0 <= pool.resident_bytes() <= 2 * LAYERS * (SLOTS + PAGE) * TOKEN_BYTES // 2
        pytest.skip("one slab")
    pages, unit_bytes = SLOTS // PAGE + 1, 4 * PAGE * TOKEN_BYTES
    units = pool.units()
    assert (units.layers_per_group, units.groups, units.last_group_layers, units.page_tokens) == (4, 2, 2, PAGE)
    assert (units.unit_bytes, units.unit_waste_bytes) == (unit_bytes, 0)
    assert units.last_unit_waste_bytes == unit_bytes // 2
    assert (units.units, units.committed, units.waste_bytes) == (2 * pages, 2 * pages, pages * unit_bytes // 2)
    pool.give_up_pages([3, 4])
    assert (pool.units().committed, pool.units().waste_bytes) == (2 * pages - 4, (pages - 2) * unit_bytes // 2)


def test_taking_back_is_all_or_nothing(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(pool, "arenas"):
        pytest.skip("of an arena only")
    pool.give_up_pages([1, 4])

    def failing(units: Any) -> None:
        raise ArenaExhausted("no memory")

    monkeypatch.setattr(pool.arenas[2], "commit", failing)
    with pytest.raises(ArenaExhausted):
        pool.take_back_pages([1, 4])
    assert [arena.committed for arena in pool.arenas.values()] == [SLOTS // PAGE - 1] * 2


def test_what_an_arena_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshift.backends.sglang.plugin.pool import ArenaKvPool

    monkeypatch.setenv(LAYERS_PER_GROUP_VARIABLE, "3")
    with pytest.raises(ValueError, match=r"starts at layer 4.*at 3 or 6"):
        make(ArenaKvPool)
    monkeypatch.setenv(LAYERS_PER_GROUP_VARIABLE, "1")
    with pytest.raises(ValueError, match="multiple of 64"):
        make(ArenaKvPool, head_num=1, head_dim=80, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="one head size"):
        make(ArenaKvPool, v_head_dim=16)


def test_layers_come_and_go(pool: Any) -> None:
    slots = torch.tensor([3, 17, 95, 40])
    kept = write(pool, START + 4, slots)
    before = pool.resident_bytes()
    pool.give_up_pages([4])
    pool.stage_layers(range(0, START), np.array([4]))
    staged = pool.layer_buffers(range(0, START))
    for key, value in staged:
        key[slots] = 7.0
        value[slots] = 8.0
    assert pool.resident_bytes() > before
    dropped = pool.commit_layers(0, START)
    assert (pool.start_layer, pool.layer_num, len(dropped)) == (0, START, LAYERS)
    assert float(pool.get_key_buffer(2)[slots].mean()) == 7.0
    assert float(pool.get_value_buffer(3)[slots].mean()) == 8.0
    written = write(pool, 1, slots)
    assert torch.equal(pool.get_key_buffer(1)[slots], written[0])
    if pool.units() is not None:
        assert list(pool.arenas) == [0]
        assert pool.units().committed == SLOTS // PAGE
    assert torch.equal(dropped[4][0][slots], kept[0])


def test_a_pool_without_layers_gets_some(pool: Any) -> None:
    end = START + LAYERS
    pool.commit_layers(end, end)
    assert (pool.layer_num, pool.k_buffer, pool.model_layer_ids) == (0, [], ())
    assert pool.resident_bytes() == 0
    pool.give_up_pages([1])
    pool.take_back_pages([1])
    pool.stage_layers(range(START, end), [])
    pool.unstage_layers()
    assert pool.staged == {}
    with pytest.raises(KeyError):
        pool.layer_buffers([START])
    pool.stage_layers(range(START, end), [])
    pool.commit_layers(START, end)
    key, _ = write(pool, START + 5, torch.tensor([20]))
    assert torch.equal(pool.get_key_buffer(START + 5)[20:21], key)
    if pool.units() is not None:
        assert (list(pool.arenas), pool.units().last_group_layers) == ([1, 2], 2)


def test_live_slots(pool: Any) -> None:
    live = pool.live_slots([1, 3], [4]).tolist()
    assert sorted({slot // PAGE for slot in live}) == [2, 5, 6]
    assert len(live) == 3 * PAGE
