"""A rank's KV memory: SGLang's pool with compiled writes and a dirty map; or units of an arena below it, with
layers stacked k by k.

    SGLang            slots, pages, free list, prefix tree          (unchanged: it sees ordinary strided buffers)
    ArenaKvPool       k_buffer[layer], v_buffer[layer]: views       a page of a group of k layers is one unit
    Arena             one a group; units backed and given back one by one

On a GPU: `cuda_pool.py`.
"""

import logging
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, move_kv_cache_native

from meshift.backends.sglang import wire
from meshift.backends.sglang.plugin.activate import LAYERS_PER_GROUP_VARIABLE
from meshift.backends.sglang.plugin.layers.pool import LayerBuffers, MovableLayers
from meshift.kernels.cpu.check import kernel_problem
from meshift.kernels.cpu.slots import store_tokens
from meshift.kernels.places import LayerPlaces
from meshift.kv_memory.arena import Arena, CpuArena
from meshift.kv_memory.arena.cpu import resident_bytes
from meshift.kv_memory.dirty_map import DirtyMap
from meshift.kv_memory.stacking import OS_PAGE_BYTES, Stacking, default_unit_bytes, page_step

logger = logging.getLogger(__name__)


def pool_class() -> type:
    """The pool that this process's settings ask for."""
    return ArenaKvPool if os.environ.get(LAYERS_PER_GROUP_VARIABLE) else MeshKvPool


class MeshKvPool(MovableLayers, MHATokenToKVPool):  # type: ignore[misc]
    """SGLang's own buffers. Who writes marks the slots, after they are written: the pool what goes through it, the
    scheduler what a step has written (`after_step`), whether the pool was asked or a CUDA graph replayed."""

    marks_stores = True
    """Whether each layer's store marks too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._places = LayerPlaces()
        super().__init__(*args, **kwargs)
        self._compiled = str(self.device) == "cpu" and kernel_problem() is None
        self.dirty = DirtyMap(self.size + self.page_size)

    def _store_kv_layer(self, layer_idx: int, loc: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor) -> None:
        if not self._compiled or not self._store_compiled(layer_idx, loc, cache_k, cache_v):
            super()._store_kv_layer(layer_idx, loc, cache_k, cache_v)
        if self.marks_stores:
            self._mark(loc)

    def _store_compiled(self, layer_idx: int, loc: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether the compiled write takes these: int64 slots, and tokens whose heads are contiguous."""
        place = self._places.of(layer_idx, self.k_buffer[layer_idx], self.v_buffer[layer_idx])
        if place is None:
            return False
        try:
            store_tokens(place, loc, key, value)
        except ValueError:
            return False
        return True

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        super().move_kv_cache(tgt_loc, src_loc)
        self._mark(tgt_loc)

    def load_cpu_copy(self, kv_cache_cpu: Any, indices: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        super().load_cpu_copy(kv_cache_cpu, indices, *args, **kwargs)
        self._mark(indices)

    def mark_written(self, slots: torch.Tensor) -> None:
        """Somebody else has written these."""
        self._mark(slots)

    def after_step(self, slots: torch.Tensor | None, stream: Any = None) -> None:
        """A step that writes these (None: it doesn't say, and writes none) was given to the device, on that stream of
        it."""
        if slots is not None:
            self._mark(slots)

    def await_steps(self) -> None:
        """Before slots are read that were marked: what the device does next comes after the steps so far."""

    def give_up_pages(self, pages: ArrayLike) -> int:
        """These hold nothing any more; bytes that went back to the system."""
        return 0

    def take_back_pages(self, pages: ArrayLike) -> None:
        """These may be written again. Raises ArenaExhausted; nothing has changed then."""

    def resident_bytes(self) -> int:
        """What the system keeps in memory for K and V."""
        tensors = (*self.k_buffer, *self.v_buffer, *(tensor for pair in self.staged.values() for tensor in pair))
        return sum(resident_bytes(tensor.data_ptr(), tensor.nbytes) for tensor in tensors)

    def units(self) -> wire.KvUnits | None:
        """Those of stacked layers; None: one slab a layer, shared out token by token."""
        return None

    def _switch_layers(self, start: int, end: int) -> None:
        # Places keep memory; they are made again for what is here now.
        self._places = LayerPlaces()

    def _mark(self, slots: torch.Tensor) -> None:
        if self.dirty.readers:
            self.dirty.mark(slots.cpu().numpy())


class ArenaKvPool(MeshKvPool):
    """Units of an arena. The number of layers in a group comes from the environment, the page from SGLang."""

    granule = OS_PAGE_BYTES
    """Units are multiples of so many bytes."""

    def _create_buffers(self) -> None:
        unsupported = self.is_quantized_kv_cache or self.post_capture_active or self.use_hnd
        if unsupported or self.head_dim != self.v_head_dim:
            raise NotImplementedError("stacked layers need plain K and V of one head size")
        for name in ("k_scale", "v_scale", "native_k_scale", "native_v_scale", "dq_k", "dq_v"):
            setattr(self, f"{name}_buffer", None)
        self.stacking = stacking_for(self, self.granule)
        self.arenas: dict[int, Arena] = {}
        self._staged_arenas: dict[int, Arena] = {}
        self._memory: dict[int, torch.Tensor] = {}
        for group in self._groups():
            self.arenas[group], self._memory[group] = self._new_arena()
        views = [self._layer_view(self.start_layer + index) for index in range(self.layer_num)]
        self.k_buffer = [key for key, _ in views]
        self.v_buffer = [value for _, value in views]
        self._kv_buffer_descs = self._build_kv_buffer_descs() if views else []
        self._init_data_ptrs_and_strides()
        logger.info("KV memory: %s", self.stacking.describe())

    def give_up_pages(self, pages: ArrayLike) -> int:
        given = np.asarray(pages, np.int64)
        arenas = self._all_arenas()
        for arena in arenas:
            arena.release(given)
        return len(given) * self.stacking.unit_bytes * len(arenas)

    def take_back_pages(self, pages: ArrayLike) -> None:
        done: list[Arena] = []
        try:
            for arena in self._all_arenas():
                arena.commit(pages)
                done.append(arena)
        except BaseException:
            for arena in done:
                arena.release(pages)
            raise

    def resident_bytes(self) -> int:
        return sum(resident_bytes(arena.base, arena.units * arena.unit_bytes) for arena in self._all_arenas())

    def units(self) -> wire.KvUnits:
        stacking, last = self.stacking, self.stacking.groups - 1
        return wire.KvUnits(
            layers_per_group=stacking.layers_per_group,
            groups=len(self.arenas),
            last_group_layers=len(stacking.layers_of(last)),
            page_tokens=stacking.page_tokens,
            unit_bytes=stacking.unit_bytes,
            unit_waste_bytes=stacking.full_waste_bytes,
            last_unit_waste_bytes=stacking.waste_bytes(last),
            units=sum(arena.units for arena in self.arenas.values()),
            committed=sum(arena.committed for arena in self.arenas.values()),
            waste_bytes=sum(arena.committed * stacking.waste_bytes(group) for group, arena in self.arenas.items()),
        )

    def _new_layers(self, layers: Sequence[int], given_up: ArrayLike) -> dict[int, LayerBuffers]:
        k = self.stacking.layers_per_group
        absent = np.asarray(given_up, np.int64)
        for group in sorted({layer // k for layer in layers}):
            arena, self._memory[group] = self._new_arena()
            arena.release(absent)
            self._staged_arenas[group] = arena
        return {layer: self._layer_view(layer) for layer in layers}

    def _unstage_layers(self) -> None:
        for group in self._staged_arenas:
            del self._memory[group]
        self._staged_arenas = {}

    def _switch_layers(self, start: int, end: int) -> None:
        super()._switch_layers(start, end)
        self.arenas = dict(sorted({**self.arenas, **self._staged_arenas}.items()))
        self._staged_arenas = {}
        wanted = set(self._groups())
        for group in [group for group in self.arenas if group not in wanted]:
            # Its views keep the memory until the last of them goes.
            del self.arenas[group], self._memory[group]
        self.stacking = stacking_for(self, self.granule)

    def _all_arenas(self) -> list[Arena]:
        """Those of layers that are to come, too."""
        return [*self.arenas.values(), *self._staged_arenas.values()]

    def _groups(self) -> range:
        k = self.stacking.layers_per_group
        return range(self.start_layer // k, -(-(self.start_layer + self.layer_num) // k))

    @property
    def _pages(self) -> int:
        return int(self.size + self.page_size) // int(self.page_size)

    def _new_arena(self) -> tuple[Arena, torch.Tensor]:
        """One that is all committed, and its bytes."""
        arena = CpuArena(self._pages, self.stacking.unit_bytes)
        arena.commit(range(arena.units))
        return arena, arena.bytes

    def _move_kv_cache_impl(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """SGLang's kernel copies a slot's whole stride, which is that of all layers of the group."""
        move_kv_cache_native(self.k_buffer, self.v_buffer, tgt_loc, src_loc)

    def _layer_view(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        k = self.stacking.layers_per_group
        elements = self._memory[layer // k].view(self.store_dtype)
        stack = elements.view(-1, k, 2, self.head_num, self.head_dim)[: self.size + self.page_size]
        return stack[:, layer % k, 0], stack[:, layer % k, 1]


def stacking_for(pool: Any, granule: int) -> Stacking:
    """The units of a pool, multiples of `granule` bytes. Raises ValueError where groups would be cut between stages, or
    where pages of this size can't fill units of whole granules: SGLang's own code needs slots at one stride."""
    k = int(os.environ[LAYERS_PER_GROUP_VARIABLE])
    if pool.start_layer % k and pool.layer_num:
        low = pool.start_layer // k * k
        raise ValueError(f"a stage starts at layer {pool.start_layer}; with {k} layers a group: at {low} or {low + k}")
    sizes = {"heads": pool.head_num, "head_dim": pool.head_dim, "element_bytes": pool.store_dtype.itemsize}
    unit_bytes = default_unit_bytes(**sizes, layers_per_group=k, page_tokens=pool.page_size, granule=granule)
    layers = max(1, pool.start_layer + pool.layer_num)
    stacking = Stacking(layers=layers, **sizes, unit_bytes=unit_bytes, layers_per_group=k)
    if not stacking.affine or stacking.page_tokens != pool.page_size:
        step = page_step(stacking.token_stride, granule)
        raise ValueError(f"page_size must be a multiple of {step} for {k} layers a group, not {pool.page_size}")
    return stacking
