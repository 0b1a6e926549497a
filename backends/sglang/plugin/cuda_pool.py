"""A rank's KV memory on a GPU: units of 2 MiB of the CUDA driver's virtual memory, layers stacked k by k."""

from typing import Any

import torch

from meshift.backends.sglang.plugin.pool import ArenaKvPool
from meshift.kernels.places import KvPlace
from meshift.kv_memory.arena import Arena
from meshift.kv_memory.arena.cuda import CudaArena, CudaVirtualMemory, VirtualMemory, device_bytes
from meshift.kv_memory.stacking import CUDA_UNIT_BYTES


class CudaArenaKvPool(ArenaKvPool):
    """As on a CPU; slots lie at one stride here too, so SGLang's own attention backends that mind strides serve it."""

    granule = CUDA_UNIT_BYTES
    marks_stores = False
    # It waits for the device, which a graph that is being captured can't; and a graph's replay stores nothing here.

    _steps: Any = None
    """The event of the last step that was given to the device."""

    def after_step(self, slots: torch.Tensor | None, stream: Any = None) -> None:
        """The event first: who finds the mark finds the event of that step, or of a later one."""
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream or torch.cuda.current_stream())
        self._steps = event
        super().after_step(slots, stream)

    def await_steps(self) -> None:
        """A step may have been launched on another stream, and be marked, but not done."""
        if self._steps is not None:
            torch.cuda.current_stream().wait_event(self._steps)

    def resident_bytes(self) -> int:
        """What is committed: the driver gives all of a unit at once."""
        return sum(arena.committed * arena.unit_bytes for arena in self.arenas.values())

    def place(self, layer: int) -> KvPlace:
        """A layer's K and V, by the addresses of its group's units; given up pages are among them."""
        stacking = self.stacking
        group = stacking.group_of(layer)
        arena = self.arenas[group]
        return KvPlace(
            pages=torch.from_numpy(arena.addresses(range(arena.units))).to(self.device),
            page_tokens=stacking.page_tokens,
            key_offset=stacking.key_offset(layer),
            value_offset=stacking.value_offset(layer),
            token_stride=stacking.token_stride,
            head_stride=stacking.head_dim * stacking.element_bytes,
            slots=arena.units * stacking.page_tokens,
            heads=stacking.heads,
            head_dim=stacking.head_dim,
            dtype=self.store_dtype,
            memory=(self._memory[group],),
        )

    def _new_arena(self) -> tuple[Arena, torch.Tensor]:
        device = self._device_index()
        arena = CudaArena(self._virtual_memory(device), self._pages, self.stacking.unit_bytes)
        arena.commit(range(arena.units))
        return arena, self._bytes_of(arena, device)

    def _device_index(self) -> int:
        return torch.cuda.current_device()

    def _virtual_memory(self, device: int) -> VirtualMemory:
        # The driver's context must be there.
        torch.zeros(1, device=torch.device("cuda", device))
        return CudaVirtualMemory(device)

    def _bytes_of(self, arena: CudaArena, device: int) -> torch.Tensor:
        return device_bytes(arena, device)

    def _store_kv_layer(self, layer_idx: int, loc: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor) -> None:
        """SGLang's own kernel takes buffers for contiguous."""
        self.k_buffer[layer_idx][loc] = cache_k
        self.v_buffer[layer_idx][loc] = cache_v
