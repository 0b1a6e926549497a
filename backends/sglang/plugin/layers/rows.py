"""KV rows of some layers as the payload of a patch: which slots, then what is in them.

    int64 [slots]  |  [layers, slots, 2, heads, head_dim]

Slots are the same on all ranks, so one patch carries any number of them, wherever they lie. Of its rectangle the tokens
only count them.
"""

import contextlib
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from meshift.kernels import slots as reference
from meshift.kernels.cpu import slots as compiled
from meshift.kernels.cpu.build import KernelUnavailable
from meshift.kernels.cpu.library import load
from meshift.kernels.places import KvPlace
from meshift.kernels.slots import KvBuffers, staging_shape

SLOT_BYTES = 8
HASH_SLOTS = 256
Slots = NDArray[np.int64]


class LayerRows:
    """K and V of adjacent layers of one rank. What it is made of stays as long as it does."""

    def __init__(self, buffers: KvBuffers) -> None:
        self._buffers = list(buffers)
        key = self._buffers[0][0]
        self._dtype = key.dtype
        self._device = key.device
        self.heads, self.head_dim = int(key.shape[1]), int(key.shape[2])
        self._places = _places(self._buffers)

    @property
    def layers(self) -> int:
        """How many."""
        return len(self._buffers)

    @property
    def slot_bytes(self) -> int:
        """Of one slot in a patch."""
        return SLOT_BYTES + self.layers * 2 * self.heads * self.head_dim * self._dtype.itemsize

    def gather(self, slots: Slots, out: memoryview) -> None:
        """Fill `out`, of `len(slots) * slot_bytes`."""
        count = len(slots)
        if not count:
            return
        np.frombuffer(out, np.int64, count)[:] = slots
        host = self._host(out[SLOT_BYTES * count :], count)
        index = torch.from_numpy(slots)
        if self._places is not None:
            compiled.gather_places(self._places, index, host)
        elif self._device.type == "cpu":
            reference.gather_slots(self._buffers, index, host)
        else:
            moved = torch.empty_like(host, device=self._device)
            host.copy_(reference.gather_slots(self._buffers, index.to(self._device), moved))

    def scatter(self, payload: bytes | memoryview) -> Slots:
        """Write what `gather` gave; which slots. Raises ValueError for another size, IndexError for a slot that doesn't
        exist."""
        view = memoryview(payload)
        count, rest = divmod(view.nbytes, self.slot_bytes)
        if rest:
            raise ValueError(f"{view.nbytes} bytes are not whole slots of {self.slot_bytes}")
        if not count:
            return np.empty(0, np.int64)
        slots = np.frombuffer(view, np.int64, count).copy()
        index, host = torch.from_numpy(slots), self._host(view[SLOT_BYTES * count :], count)
        if self._places is not None:
            compiled.scatter_places(host, index, self._places)
        else:
            reference.scatter_slots(host.to(self._device), index.to(self._device), self._buffers)
        return slots

    def hash(self, slots: Slots) -> str:
        """Of what is in these slots."""
        hasher = hashlib.blake2b(digest_size=16)
        for start in range(0, len(slots), HASH_SLOTS):
            piece = slots[start : start + HASH_SLOTS]
            out = memoryview(bytearray(len(piece) * self.slot_bytes))
            self.gather(piece, out)
            hasher.update(out)
        return hasher.hexdigest()

    def _host(self, view: memoryview, count: int) -> torch.Tensor:
        shape = staging_shape(self._buffers, count)
        if view.readonly:
            # torch has no tensors that can't be written.
            view = memoryview(bytearray(view))
        return torch.frombuffer(view, dtype=torch.uint8).view(self._dtype).view(shape)


def _places(buffers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """For the compiled copies; None where they don't serve."""
    if buffers[0][0].device.type != "cpu":
        return None
    with contextlib.suppress(KernelUnavailable, ValueError):
        load()
        return [KvPlace.of_buffers(*pair) for pair in buffers]
    return None
