"""Our attention on a GPU, as SGLang's attention backends `meshift_triton` and `meshift_flash`.

Both stand on SGLang's `torch_native`, as on a CPU. They aren't captured into CUDA graphs."""

from typing import Any

import torch

from meshift.backends.sglang.plugin.activate import FLASH_ATTENTION_NAME, TRITON_ATTENTION_NAME
from meshift.backends.sglang.plugin.attention import Compute, MeshAttention
from meshift.kernels import flash_attention
from meshift.kernels.attention import AttentionBatch
from meshift.kernels.flash_attention import FlashBatch
from meshift.kernels.places import KvPlace


def register() -> None:
    """Under their names."""
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    add_attention_backend_choices([TRITON_ATTENTION_NAME, FLASH_ATTENTION_NAME])
    register_attention_backend(TRITON_ATTENTION_NAME)(TritonAttention)
    register_attention_backend(FLASH_ATTENTION_NAME)(FlashAttention)


class TritonAttention(MeshAttention):
    """With our Triton kernel, over the addresses of units; of strided slots where there is no arena."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self._places: dict[int, KvPlace] = {}
        self._query_longest = self._longest = 0

    def _begin_step(self, batch: AttentionBatch) -> None:
        counts = batch.query_starts[1:] - batch.query_starts[:-1]
        self._query_longest, self._longest = torch.stack((counts.max(), batch.lengths.max())).tolist()

    def _kernel(self, query: torch.Tensor, layer: Any, batch: AttentionBatch) -> Compute | None:
        from meshift.kernels import triton_attention

        place = self._place_of(layer.layer_id)
        if query.dtype != place.dtype or place.dtype not in triton_attention.ELEMENTS:
            return None

        def compute() -> torch.Tensor:
            out = torch.empty_like(query)
            triton_attention.attend(query, place, batch, out, layer.scaling, self._query_longest, self._longest)
            return out

        return compute

    def _place_of(self, layer_id: int) -> KvPlace:
        pool = self.token_to_kv_pool
        if layer_id not in self._places:
            if hasattr(pool, "place"):
                self._places[layer_id] = pool.place(layer_id)
            else:
                place = KvPlace.of_buffers(pool.get_key_buffer(layer_id), pool.get_value_buffer(layer_id))
                self._places[layer_id] = place.to(self.device)
        return self._places[layer_id]


class FlashAttention(MeshAttention):
    """With flash-attn's paged kernel, over strided blocks."""

    def __init__(self, model_runner: Any) -> None:
        """Raises RuntimeError, which names what would do, if flash-attn isn't there or can't serve the pool."""
        super().__init__(model_runner)
        pool = self.token_to_kv_pool
        self._page_tokens = int(pool.page_size)
        self._step: FlashBatch | None = None
        other = f"or choose attention_backend={TRITON_ATTENTION_NAME}"
        found = flash_attention.problem(self._page_tokens, pool.head_dim, pool.dtype)
        if found:
            raise RuntimeError(f"{found}; {other}")
        try:
            self._paged_kernel = flash_attention.paged_kernel()
        except ImportError as error:
            message = f"{FLASH_ATTENTION_NAME} needs the package flash-attn ({error}): install it, {other}"
            raise RuntimeError(message) from error

    def _begin_step(self, batch: AttentionBatch) -> None:
        self._step = FlashBatch.of(batch, self._page_tokens)

    def _kernel(self, query: torch.Tensor, layer: Any, batch: AttentionBatch) -> Compute | None:
        pool, step = self.token_to_kv_pool, self._step
        buffers = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        if step is None or query.dtype != buffers[0].dtype:
            return None
        key, value = (flash_attention.blocks(buffer, self._page_tokens) for buffer in buffers)
        return lambda: flash_attention.attend(self._paged_kernel, query, key, value, step, layer.scaling)
