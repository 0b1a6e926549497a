"""KV memory in torch tensors, as an engine keeps it: rows of slots in, bytes of a rectangle out, and back.

`TorchRows` is one rank's memory. `TorchRowsSource` and `TorchRowsSink` are one request on it, with its map
from tokens to slots, for `KvSender` and `KvReceiver`; an engine that stages by itself uses `TorchRows` and
`staged.py` directly. All layers of a rectangle go into one buffer, in the order of a patch's payload:
layer, token, K before V, head. Tensors are on the CPU, of any type of elements."""

from collections.abc import Sequence
from math import prod

import torch

from meshift.kernels.slots import KvBuffers, gather_slots, scatter_slots
from meshift.kv_memory.rectangle import Rectangle


class TorchRows:
    """One rank's KV memory: the layers and heads of `owned` (its tokens don't count).

    Copies run on the caller's thread. Other threads may write other slots meanwhile."""

    def __init__(self, buffers: KvBuffers, owned: Rectangle) -> None:
        """`buffers`: for each owned layer, K and V `[slots, heads, head_dim]`, of any strides. Raises ValueError
        unless they have `owned.layers` layers of `owned.heads` heads."""
        if len(buffers) != owned.layers:
            raise ValueError(f"{len(buffers)} layers of tensors for {owned}")
        for tensor in (tensor for pair in buffers for tensor in pair):
            if tensor.dim() != 3 or tensor.shape[1] != owned.heads:
                raise ValueError(f"a tensor {list(tensor.shape)} for {owned.heads} heads")
            if tensor.shape != buffers[0][0].shape or tensor.dtype != buffers[0][0].dtype:
                raise ValueError("the tensors of a rank differ")
            if tensor.device.type != "cpu":
                raise ValueError(f"a tensor on {tensor.device}")
        self.owned = owned
        self._buffers = tuple(buffers)

    @property
    def row_bytes(self) -> int:
        """Of one head's K (or V) of one token and layer; 0 without layers."""
        if not self._buffers:
            return 0
        tensor = self._buffers[0][0]
        return int(tensor.shape[2]) * tensor.element_size()

    @property
    def token_bytes(self) -> int:
        """Of one token in all owned layers and heads, K and V."""
        return self.owned.layers * self.owned.heads * 2 * self.row_bytes

    def byte_count(self, rectangle: Rectangle) -> int:
        """Of a rectangle's payload."""
        return prod((rectangle.layers, rectangle.tokens, rectangle.heads, 2, self.row_bytes))

    def gather(self, rectangle: Rectangle, slots: torch.Tensor, out: memoryview) -> None:
        """Fill `out` with the values of a rectangle. Token i lives in `slots[i]`, `[tokens]` of int32 or
        int64.

        Raises ValueError outside `owned` or `slots`, or for another size; IndexError for a slot that doesn't
        exist."""
        self._check(rectangle, slots, out)
        if not rectangle.empty:
            part = self._part(rectangle)
            staging = self._staging(rectangle, out)
            gather_slots(part, slots[rectangle.token_start : rectangle.token_end], staging)

    def scatter(self, rectangle: Rectangle, slots: torch.Tensor, payload: bytes | memoryview) -> None:
        """Write a payload into the slots. Raises as `gather`; nothing is written then."""
        self._check(rectangle, slots, payload)
        if not rectangle.empty:
            staging = self._staging(rectangle, payload)
            part = self._part(rectangle)
            scatter_slots(staging, slots[rectangle.token_start : rectangle.token_end], part)

    def _check(self, rectangle: Rectangle, slots: torch.Tensor, payload: bytes | memoryview) -> None:
        owned, tokens = self.owned, slots.shape[0]
        allowed = Rectangle(owned.layer_start, owned.layer_end, 0, tokens, owned.head_start, owned.head_end)
        if not rectangle.empty and allowed.intersect(rectangle) != rectangle:
            raise ValueError(f"{rectangle} is not within {allowed}")
        size = memoryview(payload).nbytes
        if size != self.byte_count(rectangle):
            raise ValueError(f"{size} bytes are not the {self.byte_count(rectangle)} of {rectangle}")

    def _part(self, rectangle: Rectangle) -> KvBuffers:
        owned = self.owned
        layers = slice(rectangle.layer_start - owned.layer_start, rectangle.layer_end - owned.layer_start)
        heads = slice(rectangle.head_start - owned.head_start, rectangle.head_end - owned.head_start)
        return [(k[:, heads], v[:, heads]) for k, v in self._buffers[layers]]

    def _staging(self, rectangle: Rectangle, payload: bytes | memoryview) -> torch.Tensor:
        """The same memory as a tensor `[layers, tokens, 2, heads, head_dim]`."""
        view = memoryview(payload)
        if view.readonly:
            # torch has no tensors that can't be written.
            view = memoryview(bytearray(view))
        tensor = self._buffers[0][0]
        shape = (rectangle.layers, rectangle.tokens, 2, rectangle.heads, tensor.shape[2])
        return torch.frombuffer(view, dtype=torch.uint8).view(tensor.dtype).view(shape)


class _TorchRequest:
    """One request on `TorchRows`; a `KvReader`."""

    def __init__(self, rows: TorchRows, slots: torch.Tensor | Sequence[int]) -> None:
        self._rows = rows
        self._slots = torch.as_tensor(slots, dtype=torch.int64)

    def gather(self, rectangle: Rectangle) -> memoryview:
        """A copy of the values there, in memory of its own. Raises as `TorchRows.gather`."""
        out = memoryview(bytearray(self._rows.byte_count(rectangle)))
        self._rows.gather(rectangle, self._slots, out)
        return out


class TorchRowsSource(_TorchRequest):
    """A request that moves away; a `KvSource`. Its engine says how far it has written, and when its slots
    change."""

    def __init__(self, rows: TorchRows, slots: torch.Tensor | Sequence[int], written: int = 0) -> None:
        """Token i lives in `slots[i]`, of which the first `written` hold KV."""
        super().__init__(rows, slots)
        self._generation = 0
        self._written = written

    def generation(self) -> int:
        """Grows with `relocate`."""
        return self._generation

    def written(self) -> int:
        """Tokens that hold KV."""
        return self._written

    def grow(self, slots: torch.Tensor | Sequence[int], written: int) -> None:
        """The engine has written up to `written` tokens, the newest of them in further `slots`."""
        self._slots = torch.cat((self._slots, torch.as_tensor(slots, dtype=torch.int64)))
        self._written = written

    def relocate(self, slots: torch.Tensor | Sequence[int], written: int = 0) -> None:
        """It was retracted and came back: other slots, of which the first `written` hold KV."""
        self._slots = torch.as_tensor(slots, dtype=torch.int64)
        self._generation += 1
        self._written = written


class TorchRowsSink(_TorchRequest):
    """Slots that are reserved for a request that moves in; a `KvSink`."""

    def scatter(self, rectangle: Rectangle, payload: bytes | memoryview) -> None:
        """Write the values there. Raises as `TorchRows.scatter`."""
        self._rows.scatter(rectangle, self._slots, payload)
