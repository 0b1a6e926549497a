"""What a KV pool does for layers that come and go. Slots are the same in all layers, so a layer's KV is memory of its
own that joins the pool, or leaves it."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

LayerBuffers = tuple[torch.Tensor, torch.Tensor]


class MovableLayers:
    """Part of a pool of SGLang's kind: `k_buffer` and `v_buffer` hold layers [start_layer, start_layer + layer_num).

    Staged layers are here and not computed with yet; whoever resizes the pool minds them too."""

    start_layer: int
    layer_num: int
    k_buffer: list[torch.Tensor]
    v_buffer: list[torch.Tensor]

    def _new_layers(self, layers: Sequence[int], given_up: ArrayLike) -> dict[int, LayerBuffers]:
        """Memory for these, but for pages that are given up."""
        pool: Any = self
        rows = pool.size + pool.page_size
        padded = -(-rows // pool.page_size) * pool.page_size
        made = {}
        for layer in layers:
            both = torch.zeros((2, padded, pool.head_num, pool.head_dim), dtype=pool.store_dtype, device=pool.device)
            made[layer] = both[0, :rows], both[1, :rows]
        return made

    def _switch_layers(self, start: int, end: int) -> None:
        """Layers [start, end) are the pool's now; what else it has to note."""

    def _unstage_layers(self) -> None:
        """What was staged isn't wanted."""

    @property
    def staged(self) -> dict[int, LayerBuffers]:
        """By layer."""
        found: dict[int, LayerBuffers] = self.__dict__.setdefault("_staged_layers", {})
        return found

    def stage_layers(self, layers: Sequence[int], given_up: ArrayLike) -> None:
        """Take memory for layers that are to come. Raises ArenaExhausted; nothing has changed then."""
        self.staged.update(self._new_layers(layers, given_up))

    def unstage_layers(self) -> None:
        """They don't come: nobody may write into them any more."""
        self.staged.clear()
        self._unstage_layers()

    def layer_buffers(self, layers: Iterable[int]) -> list[LayerBuffers]:
        """K and V of layers that are held or staged. Raises KeyError."""
        held = self._held()
        return [self.staged[layer] if layer in self.staged else held[layer] for layer in layers]

    def commit_layers(self, start: int, end: int) -> list[LayerBuffers]:
        """The pool holds layers [start, end) from now on; memory of what it doesn't hold any more, which goes with what
        is returned. On the step thread, between two steps."""
        pool: Any = self
        have = {**self._held(), **self.staged}
        self.staged.clear()
        kept = [have.pop(layer) for layer in range(start, end)]
        pool.start_layer, pool.end_layer, pool.layer_num = start, end, end - start
        pool.k_buffer = [key for key, _ in kept]
        pool.v_buffer = [value for _, value in kept]
        self._switch_layers(start, end)
        pool._kv_buffer_descs = pool._build_kv_buffer_descs() if kept else []
        pool._init_data_ptrs_and_strides()
        pool.model_layer_ids = tuple(range(start, end))
        return list(have.values())

    def live_slots(self, free_pages: ArrayLike, given_up: ArrayLike) -> NDArray[np.int64]:
        """All slots but those of pages that hold nothing, and the page that pads."""
        pool: Any = self
        page_size = int(pool.page_size)
        live = np.ones((pool.size + page_size) // page_size, np.bool_)
        live[0] = False
        live[np.asarray(free_pages, np.int64)] = False
        live[np.asarray(given_up, np.int64)] = False
        first = np.flatnonzero(live) * page_size
        slots: NDArray[np.int64] = (first[:, None] + np.arange(page_size)).reshape(-1).astype(np.int64)
        return slots

    def _held(self) -> dict[int, LayerBuffers]:
        pairs = zip(self.k_buffer, self.v_buffer, strict=True)
        return {self.start_layer + index: pair for index, pair in enumerate(pairs)}
