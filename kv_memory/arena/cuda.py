"""Units in a GPU's memory: one reserved range of addresses, one physical handle a unit (CUDA's virtual memory)."""

import importlib
from typing import Any, Protocol

import numpy as np
import torch

from meshift.kv_memory.arena.base import Arena, ArenaExhausted, Units


class CudaDriverError(Exception):
    """A call of the driver failed; `code` is its name, such as CUDA_ERROR_OUT_OF_MEMORY."""

    def __init__(self, call: str, code: str) -> None:
        super().__init__(f"{call}: {code}")
        self.code = code


class VirtualMemory(Protocol):
    """What an arena needs of the driver. All raise CudaDriverError."""

    def granularity(self) -> int:
        """The smallest unit; others are multiples of it."""

    def reserve(self, byte_count: int) -> int:
        """A range of addresses without memory."""

    def free_reservation(self, address: int, byte_count: int) -> None:
        """The opposite."""

    def create(self, byte_count: int) -> int:
        """Physical memory: its handle."""

    def destroy(self, handle: int) -> None:
        """The opposite; memory that is mapped stays until it is unmapped."""

    def map(self, address: int, byte_count: int, handle: int) -> None:
        """Put memory at addresses, readable and writable by the device."""

    def unmap(self, address: int, byte_count: int) -> None:
        """The opposite."""

    def synchronize(self) -> None:
        """Wait until the device uses no memory."""


class CudaArena(Arena):
    """The unit's size must be a multiple of the driver's granularity (2 MiB). A `release` waits for the device."""

    def __init__(self, memory: VirtualMemory, units: int, unit_bytes: int) -> None:
        super().__init__(units, unit_bytes)
        if unit_bytes % memory.granularity():
            raise ValueError(f"a unit of {unit_bytes} bytes isn't a multiple of {memory.granularity()}")
        self._memory = memory
        self._handles: dict[int, int] = {}
        try:
            self._base = memory.reserve(units * unit_bytes)
        except CudaDriverError as error:
            raise ArenaExhausted(f"{units * unit_bytes} bytes of addresses can't be reserved: {error}") from error
        self._open = True

    @property
    def base(self) -> int:
        return self._base

    def close(self) -> None:
        if self._open:
            backed = np.flatnonzero(self._backed)
            if len(backed):
                self.release(backed)
            self._memory.free_reservation(self._base, self.units * self.unit_bytes)
            self._open = False

    def _commit(self, units: Units) -> None:
        done: list[int] = []
        try:
            for unit in units.tolist():
                self._back(unit)
                done.append(unit)
        except CudaDriverError as error:
            for unit in done:
                self._take_back(unit)
            raise ArenaExhausted(f"no memory for {len(units)} units of {self.unit_bytes} bytes: {error}") from error

    def _release(self, units: Units) -> None:
        self._memory.synchronize()
        for unit in units.tolist():
            self._take_back(unit)

    def _back(self, unit: int) -> None:
        handle = self._memory.create(self.unit_bytes)
        try:
            self._memory.map(self._base + unit * self.unit_bytes, self.unit_bytes, handle)
        except CudaDriverError:
            self._memory.destroy(handle)
            raise
        self._handles[unit] = handle

    def _take_back(self, unit: int) -> None:
        self._memory.unmap(self._base + unit * self.unit_bytes, self.unit_bytes)
        self._memory.destroy(self._handles.pop(unit))


class _DeviceMemory:
    """Says where a range is, by the protocol that torch reads without copying."""

    def __init__(self, arena: CudaArena) -> None:
        self.arena = arena
        """Kept alive by the tensor."""
        self.__cuda_array_interface__ = {
            "shape": (arena.units * arena.unit_bytes,),
            "typestr": "|u1",
            "data": (arena.base, False),
            "strides": None,
            "version": 3,
        }


def device_bytes(arena: CudaArena, device: int) -> torch.Tensor:
    """All units of an arena as one tensor, [units * unit_bytes] of uint8. Unit 0 must be committed: torch asks the
    driver whose memory the first address is. Nothing may touch units that aren't committed."""
    return torch.as_tensor(_DeviceMemory(arena), device=torch.device("cuda", device))


class CudaVirtualMemory:
    """`VirtualMemory` by cuda-python, on one device, whose context must be current (torch makes it so)."""

    def __init__(self, device: int, driver: Any = None) -> None:
        """`driver`: `cuda.bindings.driver`, or what stands in for it."""
        self._driver: Any = driver or importlib.import_module("cuda.bindings.driver")
        driver = self._driver
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = device
        self._access = driver.CUmemAccessDesc()
        self._access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._access.location.id = device
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE

    def granularity(self) -> int:
        """See `VirtualMemory`."""
        flags = self._driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self._call("cuMemGetAllocationGranularity", self._properties, flags))

    def reserve(self, byte_count: int) -> int:
        """See `VirtualMemory`."""
        return int(self._call("cuMemAddressReserve", byte_count, 0, 0, 0))

    def free_reservation(self, address: int, byte_count: int) -> None:
        """See `VirtualMemory`."""
        self._call("cuMemAddressFree", address, byte_count)

    def create(self, byte_count: int) -> int:
        """See `VirtualMemory`."""
        return int(self._call("cuMemCreate", byte_count, self._properties, 0))

    def destroy(self, handle: int) -> None:
        """See `VirtualMemory`."""
        self._call("cuMemRelease", handle)

    def map(self, address: int, byte_count: int, handle: int) -> None:
        """See `VirtualMemory`."""
        self._call("cuMemMap", address, byte_count, 0, handle, 0)
        try:
            self._call("cuMemSetAccess", address, byte_count, [self._access], 1)
        except CudaDriverError:
            self.unmap(address, byte_count)
            raise

    def unmap(self, address: int, byte_count: int) -> None:
        """See `VirtualMemory`."""
        self._call("cuMemUnmap", address, byte_count)

    def synchronize(self) -> None:
        """See `VirtualMemory`."""
        self._call("cuCtxSynchronize")

    def _call(self, name: str, *arguments: Any) -> Any:
        """The call's result, if it has one."""
        code, *results = getattr(self._driver, name)(*arguments)
        if code != self._driver.CUresult.CUDA_SUCCESS:
            raise CudaDriverError(name, getattr(code, "name", str(code)))
        return results[0] if results else None
