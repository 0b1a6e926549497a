"""Our attention on a CPU as SGLang's attention backend `meshift_cpu`.

It stands on SGLang's own `torch_native` backend, which goes on to serve what the kernel doesn't: layers with a sliding
window, cross or encoder attention, heads whose K and V differ in size, other types of elements, quantised pools,
speculative decoding. Where the kernel can't be built or fails its check, everything is served by it."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool

from meshift.kernels.attention import AttentionBatch
from meshift.kernels.cpu.attention import attend, supports
from meshift.kernels.cpu.check import kernel_problem
from meshift.kernels.places import LayerPlaces

logger = logging.getLogger(__name__)

Compute = Callable[[], torch.Tensor]
"""Gives a layer's output, [tokens, query_heads, head_dim]."""


def make_backend(model_runner: Any) -> TorchNativeAttnBackend:
    """What SGLang calls for `meshift_cpu`."""
    problem = kernel_problem()
    if problem is None:
        return MeshCpuAttention(model_runner)
    logger.warning("attention falls back to SGLang's torch_native, which is several times slower: %s", problem)
    return TorchNativeAttnBackend(model_runner)


class MeshAttention(TorchNativeAttnBackend):  # type: ignore[misc]
    """SGLang's torch backend with a kernel in its place wherever that serves."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self._batch: AttentionBatch | None = None
        self._tokens = 0
        """Query tokens of the step."""
        pool = self.token_to_kv_pool
        plain = type(pool).set_kv_buffer is MHATokenToKVPool.set_kv_buffer
        self._plain_pool = plain and not (pool.use_hnd or pool.is_quantized_kv_cache)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        self._batch = self._batch_of(forward_batch) if self._plain_pool else None
        if self._batch is not None:
            self._tokens = int(self._batch.query_starts[-1])
            self._begin_step(self._batch)

    def _begin_step(self, batch: AttentionBatch) -> None:
        """What the kernel needs once for all layers of a step."""

    def _kernel(self, query: torch.Tensor, layer: Any, batch: AttentionBatch) -> Compute | None:
        """What computes a layer, after its K and V are stored; None, and nothing done: it isn't served."""
        raise NotImplementedError

    def _batch_of(self, forward_batch: Any) -> AttentionBatch | None:
        """The step's sequences for the kernel; None: not for the kernel."""
        mode = forward_batch.forward_mode
        plain = forward_batch.encoder_lens is None and forward_batch.spec_info is None
        if not plain or not (mode.is_decode() or mode.is_extend()):
            return None
        lengths = forward_batch.seq_lens.to(torch.int64).contiguous()
        starts = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=lengths.device)
        if mode.is_decode():
            torch.arange(1, len(lengths) + 1, out=starts[1:])
        else:
            torch.cumsum(forward_batch.extend_seq_lens, 0, dtype=torch.int64, out=starts[1:])
        rows = forward_batch.req_pool_indices.to(torch.int64).contiguous()
        return AttentionBatch(starts, lengths, self.req_to_token_pool.req_to_token, rows)

    def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True) -> Any:
        out = self._attend(q, k, v, layer, forward_batch, save_kv_cache)
        return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache) if out is None else out

    def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True) -> Any:
        out = self._attend(q, k, v, layer, forward_batch, save_kv_cache)
        return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache) if out is None else out

    def _attend(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save: bool) -> torch.Tensor | None:
        """The layer's output; None, nothing done: not for the kernel."""
        batch = self._batch
        if batch is None or not _plain_layer(layer):
            return None
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        compute = self._kernel(query, layer, batch) if len(query) == self._tokens else None
        if compute is None:
            return None
        if save and k is not None and v is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        return compute().view(len(query), -1)


class MeshCpuAttention(MeshAttention):
    """With the compiled kernel."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self._places = LayerPlaces()

    def forget_layers(self) -> None:
        """The pool has other layers now: keep nobody's memory."""
        self._places = LayerPlaces()

    def _kernel(self, query: torch.Tensor, layer: Any, batch: AttentionBatch) -> Compute | None:
        pool, layer_id = self.token_to_kv_pool, layer.layer_id
        place = self._places.of(layer_id, pool.get_key_buffer(layer_id), pool.get_value_buffer(layer_id))
        if place is None or query.dtype != place.dtype or not supports(place, layer.tp_q_head_num):
            return None

        def compute() -> torch.Tensor:
            out = torch.empty(query.shape, dtype=query.dtype)
            attend(query, place, batch, out, layer.scaling)
            return out

        return compute


def _plain_layer(layer: Any) -> bool:
    return (
        layer.attn_type == AttentionType.DECODER
        and not layer.is_cross_attention
        and layer.qk_head_dim == layer.v_head_dim
        and layer.sliding_window_size <= -1
    )
