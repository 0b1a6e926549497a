"""The pool of a GPU on a driver that is played by this host's memory: everything but the driver itself."""

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from meshift.backends.sglang.plugin.activate import (
    CPU_PLATFORM_VARIABLE,
    CUDA_PLATFORM_VARIABLE,
    LAYERS_PER_GROUP_VARIABLE,
    activate_platform,
)
from meshift.kernels.attention import AttentionBatch, attend_reference
from meshift.kv_memory.arena import ArenaExhausted
from meshift.kv_memory.arena.cuda import CudaDriverError

pytestmark = [pytest.mark.sglang]

UNIT = 2 << 20
K, LAYERS, HEADS, DIM = 4, 6, 8, 128
PAGE = 128
"""Tokens of four layers of 8 x 128 in bfloat16 that fill 2 MiB."""
PAGES = 3


class HostMemory:
    """A driver whose addresses are this process's; it keeps the books of what is mapped, and is full when told so."""

    def __init__(self) -> None:
        self.areas: list[Any] = []
        self.handles = 0
        self.mapped: set[int] = set()
        self.synchronized = 0
        self.left = 10**6

    def granularity(self) -> int:
        return UNIT

    def reserve(self, byte_count: int) -> int:
        area = (ctypes.c_uint8 * byte_count)()
        self.areas.append(area)
        return ctypes.addressof(area)

    def free_reservation(self, address: int, byte_count: int) -> None:
        raise AssertionError("a pool lives as long as its process")

    def create(self, byte_count: int) -> int:
        if not self.left:
            raise CudaDriverError("cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY")
        self.left -= 1
        self.handles += 1
        return self.handles

    def destroy(self, handle: int) -> None:
        self.left += 1

    def map(self, address: int, byte_count: int, handle: int) -> None:
        assert byte_count == UNIT
        assert address not in self.mapped
        self.mapped.add(address)

    def unmap(self, address: int, byte_count: int) -> None:
        self.mapped.remove(address)

    def synchronize(self) -> None:
        self.synchronized += 1


@pytest.fixture
def driver() -> HostMemory:
    return HostMemory()


@pytest.fixture
def pool(driver: HostMemory, monkeypatch: pytest.MonkeyPatch) -> Any:
    from meshift.backends.sglang.plugin.cuda_pool import CudaArenaKvPool

    monkeypatch.setenv(LAYERS_PER_GROUP_VARIABLE, str(K))

    class Played(CudaArenaKvPool):
        def _device_index(self) -> int:
            return 0

        def _virtual_memory(self, device: int) -> Any:
            return driver

        def _bytes_of(self, arena: Any, device: int) -> torch.Tensor:
            (area,) = (one for one in driver.areas if ctypes.addressof(one) == arena.base)
            return torch.frombuffer(area, dtype=torch.uint8)

    return Played(**fields())


def fields(**changes: Any) -> dict[str, Any]:
    own = {
        "size": PAGE * PAGES,
        "page_size": PAGE,
        "dtype": torch.bfloat16,
        "head_num": HEADS,
        "head_dim": DIM,
        "layer_num": LAYERS,
        "device": "cpu",
        "enable_memory_saver": False,
        "start_layer": 0,
        "end_layer": LAYERS,
    }
    return own | changes


def write(pool: Any, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    key, value = torch.randn(2, len(slots), HEADS, DIM).to(torch.bfloat16)
    pool.set_kv_buffer(SimpleNamespace(layer_id=layer), slots, key, value)
    return key, value


class Streams:
    """torch's, as far as the order of work goes: what was recorded where, and who waits for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recorded: list[tuple[Any, Any]] = []
        self.waits: list[Any] = []
        streams = self

        class Event:
            def record(self, stream: Any) -> None:
                streams.recorded.append((stream, self))

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(
            torch.cuda, "current_stream", lambda: SimpleNamespace(name="own", wait_event=self.waits.append)
        )


def test_a_step_marks_what_it_wrote_even_if_the_pool_was_not_asked(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph's replay stores without the pool."""
    streams = Streams(monkeypatch)
    pool.dirty.add_reader("move")
    write(pool, 1, torch.tensor([9]))
    assert pool.dirty.swap("move").tolist() == [], "a store can't mark while a graph is captured"
    pool.after_step(torch.tensor([9, 200, 7]), "forward")
    assert pool.dirty.swap("move").tolist() == [7, 9, 200]
    ((stream, event),) = streams.recorded
    assert stream == "forward"
    pool.await_steps()
    assert streams.waits == [event], "the copy may run on another stream than the step"
    pool.after_step(None)
    assert streams.recorded[-1][0].name == "own"
    pool.await_steps()
    assert streams.waits == [event, streams.recorded[-1][1]]
    assert pool.dirty.swap("move").tolist() == []


def test_nothing_to_wait_for_before_the_first_step(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    pool.await_steps()
    assert streams.waits == []


@pytest.mark.parametrize("overlap", [True, False])
def test_the_scheduler_marks_after_each_step(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the slots that the batch had before it: the step may take them out of it."""
    from sglang.srt.managers.scheduler import Scheduler

    from meshift.backends.sglang.plugin.scheduler import MeshScheduler

    told: list[Any] = []
    pool = SimpleNamespace(after_step=lambda slots, stream: told.append((slots, stream)))
    batch = SimpleNamespace(out_cache_loc="slots")

    def step(self: Any, batch: Any, proxies: Any = None) -> str:
        assert told == []
        batch.out_cache_loc = None
        return f"result with {proxies}"

    monkeypatch.setattr(Scheduler, "run_batch", step)
    scheduler: Any = object.__new__(MeshScheduler)
    scheduler.token_to_kv_pool_allocator = SimpleNamespace(get_kvcache=lambda: pool)
    scheduler.enable_overlap, scheduler.forward_stream = overlap, "forward"
    scheduler.agent = SimpleNamespace(layers=SimpleNamespace(after_launch=told.append))
    assert scheduler.run_batch(batch, "proxies") == "result with proxies"
    assert told == [("slots", "forward" if overlap else None), len("slots")]


def test_speculative_decoding_moves_nothing() -> None:
    from meshift.backends.sglang.plugin.kv import _speculation

    for none, obstacle in ((True, ""), (False, "speculative decoding")):
        scheduler = SimpleNamespace(spec_algorithm=SimpleNamespace(is_none=lambda none=none: none))
        assert _speculation(scheduler) == obstacle


def test_writes_reads_moves_and_marks(pool: Any) -> None:
    slots = torch.tensor([3, 130, 383, 40])
    pool.dirty.add_reader("move")
    written = {layer: write(pool, layer, slots) for layer in range(LAYERS)}
    for layer, (key, value) in written.items():
        assert torch.equal(pool.get_key_buffer(layer)[slots], key)
        assert torch.equal(pool.get_value_buffer(layer)[slots], value)
    target = torch.tensor([200, 201, 7, 8])
    pool.move_kv_cache(target, slots)
    for layer, (key, value) in written.items():
        assert torch.equal(pool.get_key_buffer(layer)[target], key)
        assert torch.equal(pool.get_value_buffer(layer)[target], value)
        assert torch.equal(pool.get_key_buffer(layer)[slots], key)
    assert pool.dirty.swap("move").tolist() == [7, 8, 200, 201]


def test_units_come_and_go(pool: Any, driver: HostMemory) -> None:
    units = pool.units()
    assert (units.unit_bytes, units.groups, units.last_group_layers, units.page_tokens) == (UNIT, 2, 2, PAGE)
    assert (units.unit_waste_bytes, units.last_unit_waste_bytes) == (0, UNIT // 2)
    assert (units.committed, units.waste_bytes) == (2 * (PAGES + 1), (PAGES + 1) * UNIT // 2)
    assert pool.resident_bytes() == units.committed * UNIT == len(driver.mapped) * UNIT
    assert pool.give_up_pages(np.array([2, 3])) == 4 * UNIT
    assert driver.synchronized == 2
    assert pool.resident_bytes() == 4 * UNIT == len(driver.mapped) * UNIT
    driver.left = 3
    with pytest.raises(ArenaExhausted, match="OUT_OF_MEMORY"):
        pool.take_back_pages([2, 3])
    assert len(driver.mapped) == 4
    driver.left = 4
    pool.take_back_pages([2, 3])
    assert len(driver.mapped) == 8


def test_the_table_of_addresses_is_where_slots_are(pool: Any) -> None:
    for layer in (0, 3, 5):
        place, key, value = pool.place(layer), pool.get_key_buffer(layer), pool.get_value_buffer(layer)
        assert (place.page_tokens, place.slots, place.dtype) == (PAGE, PAGE * (PAGES + 1), torch.bfloat16)
        for slot in (0, 127, 128, 500):
            token = int(place.pages[slot // PAGE]) + slot % PAGE * place.token_stride
            for head in (0, HEADS - 1):
                assert token + place.key_offset + head * place.head_stride == key[slot, head].data_ptr()
                assert token + place.value_offset + head * place.head_stride == value[slot, head].data_ptr()


def test_pages_that_fill_no_unit_are_refused(driver: HostMemory, pool: Any) -> None:
    with pytest.raises(ValueError, match="multiple of 128 for 4 layers a group, not 16"):
        type(pool)(**fields(page_size=16))


class Step:
    """As much of SGLang's batch as an attention backend reads."""

    def __init__(self, lengths: list[int], extends: list[int] | None, out: torch.Tensor) -> None:
        self.forward_mode = SimpleNamespace(is_decode=lambda: extends is None, is_extend=lambda: extends is not None)
        self.encoder_lens = self.spec_info = None
        self.seq_lens = torch.tensor(lengths)
        self.extend_seq_lens = torch.tensor(extends or [])
        self.req_pool_indices = torch.arange(len(lengths))
        self.out_cache_loc = out


def runner(pool: Any, table: torch.Tensor) -> Any:
    return SimpleNamespace(device="cpu", token_to_kv_pool=pool, req_to_token_pool=SimpleNamespace(req_to_token=table))


LAYER = SimpleNamespace(
    layer_id=2, tp_q_head_num=16, tp_k_head_num=HEADS, tp_v_head_num=HEADS, qk_head_dim=DIM, v_head_dim=DIM,
    is_cross_attention=False, sliding_window_size=-1, scaling=0.1, k_scale=None, v_scale=None,
)  # fmt: skip


def attend_once(backend: Any, pool: Any, extends: list[int] | None) -> None:
    """A step of two sequences; its output is the reference's."""
    from sglang.srt.layers.radix_attention import AttentionType

    LAYER.attn_type = AttentionType.DECODER
    table, lengths = backend.req_to_token_pool.req_to_token, [200, 90]
    write(pool, LAYER.layer_id, torch.cat([table[0, :200], table[1, :90]]).long())
    counts = extends or [1, 1]
    begins = [length - count for length, count in zip(lengths, counts, strict=True)]
    new = torch.cat([table[row, begins[row] : length] for row, length in enumerate(lengths)])
    step = Step(lengths, extends, new.long())
    query, key, value = (torch.randn(sum(counts), heads * DIM).to(torch.bfloat16) for heads in (16, HEADS, HEADS))
    backend.init_forward_metadata(step)
    forward = backend.forward_decode if extends is None else backend.forward_extend
    out = forward(query, key.view(-1, HEADS, DIM), value.view(-1, HEADS, DIM), LAYER, step)
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()])
    batch = AttentionBatch(starts, step.seq_lens, table, torch.arange(2))
    keys, values = pool.get_key_buffer(LAYER.layer_id), pool.get_value_buffer(LAYER.layer_id)
    assert torch.equal(keys[step.out_cache_loc], key.view(-1, HEADS, DIM))
    expected = attend_reference(query.view(-1, 16, DIM), keys, values, batch, LAYER.scaling)
    assert out.shape == (sum(counts), 16 * DIM)
    assert float((out.view_as(expected) - expected).abs().max()) < 2e-2


def slots_table() -> torch.Tensor:
    """Pages 3 and 1, and 2, in order within."""
    table = torch.full((2, 300), 2**30, dtype=torch.int32)
    pages = torch.arange(PAGE * (PAGES + 1), dtype=torch.int32).view(-1, PAGE)
    table[0, :256], table[1, :128] = torch.cat([pages[3], pages[1]]), pages[2]
    return table


@pytest.mark.parametrize("extends", [None, [60, 90]], ids=["decode", "extend"])
def test_triton_backend(pool: Any, extends: list[int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is tested by itself; here: what it is given."""
    from meshift.backends.sglang.plugin.cuda_attention import TritonAttention
    from meshift.kernels import triton_attention
    from meshift.kernels.cpu.attention import attend

    told: list[tuple[int, int]] = []

    def played(query: Any, place: Any, batch: Any, out: Any, scale: float, query_longest: int, longest: int) -> None:
        told.append((query_longest, longest))
        attend(query, place, batch, out, scale)

    monkeypatch.setattr(triton_attention, "attend", played)
    attend_once(TritonAttention(runner(pool, slots_table())), pool, extends)
    assert told == [(max(extends or [1]), 200)]


@pytest.mark.parametrize("extends", [None, [60, 90]], ids=["decode", "extend"])
def test_flash_backend(pool: Any, extends: list[int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshift.backends.sglang.plugin.cuda_attention import FlashAttention
    from meshift.kernels import flash_attention
    from tests.unit.kernels import test_flash_attention as stand

    for module in (flash_attention, stand):
        monkeypatch.setattr(module, "PAGE_STEP", PAGE)
    monkeypatch.setattr(flash_attention, "paged_kernel", lambda: stand.stand_in)
    attend_once(FlashAttention(runner(pool, slots_table())), pool, extends)


def test_what_flash_attention_needs(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshift.backends.sglang.plugin.cuda_attention import FlashAttention
    from meshift.kernels import flash_attention

    with pytest.raises(RuntimeError, match=r"such as 256, not 128; or choose attention_backend=meshift_triton"):
        FlashAttention(runner(pool, slots_table()))
    monkeypatch.setattr(flash_attention, "PAGE_STEP", PAGE)
    monkeypatch.setitem(__import__("sys").modules, "flash_attn", None)
    with pytest.raises(RuntimeError, match=r"needs the package flash-attn .*meshift_triton"):
        FlashAttention(runner(pool, slots_table()))


def test_the_platform_is_sglangs_but_for_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.platforms.cuda import CudaSRTPlatform

    from meshift.backends.sglang.plugin.cuda_platform import MeshCudaPlatform
    from meshift.backends.sglang.plugin.cuda_pool import CudaArenaKvPool

    ours, theirs = MeshCudaPlatform(), CudaSRTPlatform()
    assert ours._enum is theirs._enum
    assert (ours.capabilities, ours.device_type) == (theirs.capabilities, theirs.device_type)
    own = {name for name in vars(MeshCudaPlatform) if not name.startswith("__")}
    assert own == {"get_kv_pool_cls"}
    assert ours.get_kv_pool_cls(kind="mha") is CudaArenaKvPool
    assert ours.get_kv_pool_cls(kind="mla") is None


@pytest.mark.parametrize(
    ("gpu", "variables", "platform"),
    [
        (True, {CUDA_PLATFORM_VARIABLE: "1"}, "cuda_platform.MeshCudaPlatform"),
        (True, {CPU_PLATFORM_VARIABLE: "1"}, None),
        (True, {}, None),
        (False, {CUDA_PLATFORM_VARIABLE: "1"}, None),
        (False, {CPU_PLATFORM_VARIABLE: "1"}, "platform.PortableCpuPlatform"),
    ],
)
def test_which_platform(
    gpu: bool, variables: dict[str, str], platform: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (CUDA_PLATFORM_VARIABLE, CPU_PLATFORM_VARIABLE, "SGLANG_PLATFORM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    found = activate_platform()
    assert found == (f"meshift.backends.sglang.plugin.{platform}" if platform else None)
