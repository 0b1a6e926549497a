"""A rank's KV pool as its rectangle of the KV matrix: which cells it holds, and copies of some of them."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from meshift.backends.sglang import wire_moves as wire
from meshift.kernels import slots as reference
from meshift.kernels.cpu import slots as compiled
from meshift.kernels.cpu.build import KernelUnavailable
from meshift.kernels.cpu.library import load
from meshift.kernels.slots import KvBuffers, staging_shape
from meshift.kv_memory.rectangle import Rectangle

LAYOUT = "nhd"
"""SGLang's name of pools with one [slots, heads, head_dim] tensor for K, and one for V, a layer."""


class RankKv:
    """Tokens are given with their slots; layers and heads are the model's. `Rows` of `kv_memory.staged`, on any
    device. Slots of requests may change between two steps: who reads on another thread must know that they don't."""

    def __init__(self, pool: Any, share: wire.Share) -> None:
        """`pool` is SGLang's, `share` what `describe` says of it."""
        self._pool = pool
        self.share = share
        self.on_written: Callable[[int], None] = lambda _: None
        """Is told of how many tokens `mark_written` was."""
        self._copies = _fastest_copies(self._pool.device)

    def byte_count(self, rectangle: Rectangle) -> int:
        """Of a rectangle's payload."""
        row_bytes: int = self.share.head_dim * self._pool.store_dtype.itemsize
        return rectangle.layers * rectangle.tokens * 2 * rectangle.heads * row_bytes

    def gather(self, rectangle: Rectangle, slots: torch.Tensor, out: memoryview) -> None:
        """Fill `out` with the cells' bytes, in a patch's order. `slots`: [rectangle.tokens]."""
        buffers = self._buffers(rectangle)
        key = buffers[0][0]
        shape = staging_shape(buffers, rectangle.tokens)
        host = torch.frombuffer(out, dtype=torch.uint8).view(key.dtype).view(shape)
        if hasattr(self._pool, "await_steps"):
            self._pool.await_steps()
        if key.device.type == "cpu":
            self._copies.gather_slots(buffers, slots, host)
        else:
            host.copy_(self._copies.gather_slots(buffers, slots, torch.empty_like(host, device=key.device)))

    def scatter(self, rectangle: Rectangle, slots: torch.Tensor, payload: bytes | memoryview) -> None:
        """Write what `gather` gave. Raises ValueError for another size."""
        buffers = self._buffers(rectangle)
        key = buffers[0][0]
        shape = staging_shape(buffers, rectangle.tokens)
        raw = torch.frombuffer(payload, dtype=torch.uint8)
        if raw.numel() != key.element_size() * torch.Size(shape).numel():
            raise ValueError(f"{raw.numel()} bytes are not those of {rectangle}")
        self._copies.scatter_slots(raw.view(key.dtype).view(shape).to(key.device), slots, buffers)
        if key.device.type == "cuda":
            # Steps read it from other streams, as soon as the worker has heard that it is there.
            torch.cuda.current_stream().synchronize()

    def mark_written(self, slots: torch.Tensor) -> None:
        """On the step thread: what was scattered there counts from now on, for a pool that keeps account of it."""
        self.on_written(len(slots))
        if hasattr(self._pool, "mark_written"):
            self._pool.mark_written(slots)

    def _buffers(self, rectangle: Rectangle) -> KvBuffers:
        share = self.share
        held = Rectangle(share.layer_start, share.layer_end, 0, rectangle.token_end, share.head_start, share.head_end)
        if held.intersect(rectangle) != rectangle or rectangle.empty:
            raise ValueError(f"{rectangle} is not within {held}")
        heads = slice(rectangle.head_start - share.head_start, rectangle.head_end - share.head_start)
        pairs = [self._pool.get_kv_buffer(layer) for layer in range(rectangle.layer_start, rectangle.layer_end)]
        return [(key[:, heads], value[:, heads]) for key, value in pairs]


def _fastest_copies(device: str) -> Any:
    """The module with `gather_slots` and `scatter_slots`."""
    if device == "cpu":
        with contextlib.suppress(KernelUnavailable):
            load()
            return compiled
    return reference


def describe(scheduler: Any) -> wire.Share:
    """What this rank holds."""
    from sglang.srt.runtime_context import get_parallel

    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    config, parallel = scheduler.model_config, get_parallel()
    heads = getattr(pool, "head_num", 0)
    head_start = heads * parallel.tp_rank
    return wire.Share(
        layer_start=pool.start_layer,
        layer_end=pool.start_layer + pool.layer_num,
        head_start=head_start,
        head_end=head_start + heads,
        head_dim=getattr(pool, "head_dim", 0),
        dtype=str(pool.store_dtype).removeprefix("torch."),
        obstacle=_speculation(scheduler) or _obstacle(pool, heads * parallel.tp_size, config.get_total_num_kv_heads()),
    )


def _speculation(scheduler: Any) -> str:
    """Drafts have KV that isn't in the pool, and steps write slots that they don't name."""
    return "" if scheduler.spec_algorithm.is_none() else "speculative decoding"


def _obstacle(pool: Any, heads_held: int, heads: int) -> str:
    if getattr(pool, "kv_cache_layout", None) != LAYOUT:
        return f"a KV pool of type {type(pool).__name__}"
    if pool.is_quantized_kv_cache or pool.v_head_dim != pool.head_dim:
        return "a quantised KV pool, or values of another size than keys"
    if heads_held != heads:
        return f"ranks hold {heads_held} KV heads of {heads}: some have copies"
    return ""
