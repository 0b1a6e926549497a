"""KV memory as one numpy array: the fake that ships, source and sink of transfers in tests and examples.

A `MatrixKv` is one rank's memory, `[layers, slots, 2, heads, head_dim]`, for the layers and heads that it
owns. A `MatrixRequest` is one request on it, with its own map from tokens to slots, and implements
`KvSource` and `KvSink`. The slots of all ranks of an instance are the same; which they are differs between
instances."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from meshift.kv_memory.dirty_map import DirtyMap
from meshift.kv_memory.rectangle import Rectangle


class MatrixKv:
    """One rank's KV memory. Of `owned`, the layers and heads count."""

    def __init__(self, owned: Rectangle, slots: int, head_dim: int, dtype: DTypeLike = np.float32) -> None:
        self.owned = owned
        self.array: NDArray[np.generic] = np.zeros((owned.layers, slots, 2, owned.heads, head_dim), dtype)
        self.dirty = DirtyMap(slots)
        """Marked by every write of a request."""

    @property
    def slots(self) -> int:
        """How many there are."""
        return int(self.array.shape[1])

    def request(self, slots: ArrayLike) -> "MatrixRequest":
        """A request whose token i lives in `slots[i]`. Raises ValueError unless they exist and differ."""
        return MatrixRequest(self, slots)

    def whole(self) -> "MatrixRequest":
        """All slots, as tokens of the same number: what a layer move copies."""
        return self.request(np.arange(self.slots))


class MatrixRequest:
    """One request's KV on one rank. A `KvSource`, and a `KvSink` where its slots are reserved for a move."""

    def __init__(self, kv: MatrixKv, slots: ArrayLike) -> None:
        self._kv = kv
        self._slots = self._checked(slots)
        self._generation = 0
        self._written = 0

    def generation(self) -> int:
        """Grows with `relocate`."""
        return self._generation

    def written(self) -> int:
        """Tokens that `write` has written, from 0."""
        return self._written

    def gather(self, rectangle: Rectangle) -> bytes:
        """A copy of the values there. Raises ValueError outside the rank's layers and heads or the
        request."""
        return self._view(rectangle).tobytes()

    def scatter(self, rectangle: Rectangle, payload: bytes | memoryview) -> None:
        """Overwrite the values there; marks nothing. Raises ValueError as `gather`, or for another size."""
        layers, slots, heads = self._index(rectangle)
        array = self._kv.array
        shape = (rectangle.layers, rectangle.tokens, 2, rectangle.heads, array.shape[-1])
        values = np.frombuffer(payload, array.dtype) if memoryview(payload).nbytes else np.empty(0, array.dtype)
        if values.size != np.prod(shape):
            raise ValueError(f"{memoryview(payload).nbytes} bytes are not those of {rectangle}")
        array[layers, slots, :, heads] = values.reshape(shape)

    def write(self, start: int, payload: bytes | memoryview) -> None:
        """The engine writes tokens from `start` on, all of the rank's layers and heads: memory, marks,
        watermark."""
        array, owned = self._kv.array, self._kv.owned
        token_bytes = array[:, 0].nbytes
        end = start + memoryview(payload).nbytes // token_bytes
        rectangle = Rectangle(owned.layer_start, owned.layer_end, start, end, owned.head_start, owned.head_end)
        self.scatter(rectangle, payload)
        self._kv.dirty.mark(self._slots[start:end])
        self._written = max(self._written, end)

    def relocate(self, slots: ArrayLike, written: int = 0) -> None:
        """The request was retracted and came back: other slots, of which `written` tokens hold their KV."""
        self._slots = self._checked(slots)
        self._generation += 1
        self._written = written

    def _view(self, rectangle: Rectangle) -> NDArray[np.generic]:
        layers, slots, heads = self._index(rectangle)
        return self._kv.array[layers, slots, :, heads]

    def _index(self, rectangle: Rectangle) -> tuple[slice, NDArray[np.int64], slice]:
        owned, tokens = self._kv.owned, len(self._slots)
        allowed = Rectangle(owned.layer_start, owned.layer_end, 0, tokens, owned.head_start, owned.head_end)
        if not rectangle.empty and allowed.intersect(rectangle) != rectangle:
            raise ValueError(f"{rectangle} is not within {allowed}")
        layers = slice(rectangle.layer_start - owned.layer_start, rectangle.layer_end - owned.layer_start)
        heads = slice(rectangle.head_start - owned.head_start, rectangle.head_end - owned.head_start)
        return layers, self._slots[rectangle.token_start : rectangle.token_end], heads

    def _checked(self, slots: ArrayLike | Sequence[int]) -> NDArray[np.int64]:
        checked = np.array(slots, np.int64)
        exist = not checked.size or (checked.min() >= 0 and checked.max() < self._kv.slots)
        if not exist or len(np.unique(checked)) != len(checked):
            raise ValueError(f"slots must differ and be within [0, {self._kv.slots})")
        return checked
