"""A rank's KV pool as its rectangle of the KV matrix: which cells it holds, and copies of some of them."""

from collections.abc import Callable
from typing import Any

import torch

from meshift.backends.sglang import wire_moves as wire
from meshift.kernels import slots as reference
from meshift.kernels.cpu import slots as compiled
from meshift.kernels.cpu.checksum import crc32
from meshift.kernels.cpu.library import is_available
from meshift.kernels.places import KvPlace
from meshift.kernels.slots import KvBuffers
from meshift.kv_memory import checksum
from meshift.kv_memory.rectangle import Rectangle

LAYOUT = "nhd"
"""SGLang's name of pools with one [slots, heads, head_dim] tensor for K, and one for V, a layer."""


class RankKv:
    """Tokens are given with their slots; layers and heads are the model's. `Rows` of `kv_memory.staged`, on any
    device. Slots of requests may change between two steps: who reads on another thread must know that they don't."""

    def __init__(self, pool: Any, share: wire.Share) -> None:
        """`pool` is SGLang's, `share` what `describe` says of it."""
        self._pool = pool
        self._share = share
        self.on_written: Callable[[int], None] = lambda _: None
        """Is told of how many tokens `mark_written` was."""
        self._compiled = self._pool.device == "cpu" and _has_compiled_copies()
        self._known: dict[tuple[int, int, int, int], tuple[list[torch.Tensor], list[KvPlace]]] = {}
        """By layers and heads: the key buffers, and where everything lies as long as they are these."""
        self.beside_steps: bool = self._pool.device == "cpu"
        """Whether another thread than that which steps may read slots that may be given away meanwhile. A GPU's units
        are unmapped when they are free: there, to read one is an error that ends the process."""

    @property
    def share(self) -> wire.Share:
        """What this rank holds now."""
        return self._share

    @share.setter
    def share(self, share: wire.Share) -> None:
        """Memory of layers that have left must not be kept."""
        self._share = share
        self._known.clear()

    def byte_count(self, rectangle: Rectangle) -> int:
        """Of a rectangle's payload."""
        row_bytes: int = self.share.head_dim * self._pool.store_dtype.itemsize
        return rectangle.layers * rectangle.tokens * 2 * rectangle.heads * row_bytes

    def gather(self, rectangle: Rectangle, slots: torch.Tensor, out: memoryview) -> None:
        """Fill `out` with the cells' bytes, in a patch's order. `slots`: [rectangle.tokens]."""
        host = self._staged(rectangle, out)
        if self._compiled:
            compiled.gather_places(self._places(rectangle), slots, host)
        elif self._pool.device == "cpu":
            reference.gather_slots(self._buffers(rectangle), slots, host)
        else:
            if hasattr(self._pool, "await_steps"):
                self._pool.await_steps()
            there = torch.empty_like(host, device=self._pool.device)
            host.copy_(reference.gather_slots(self._buffers(rectangle), slots, there))

    def scatter(self, rectangle: Rectangle, slots: torch.Tensor, payload: bytes | memoryview) -> None:
        """Write what `gather` gave. Raises ValueError for another size."""
        host = self._staged(rectangle, payload)
        if self._compiled:
            compiled.scatter_places(host, slots, self._places(rectangle))
        else:
            reference.scatter_slots(host.to(self._pool.device), slots, self._buffers(rectangle))
        if self._pool.device != "cpu":
            # Steps read it from other streams, as soon as the worker has heard that it is there.
            torch.cuda.current_stream().synchronize()

    def mark_written(self, slots: torch.Tensor) -> None:
        """On the step thread: what was scattered there counts from now on, for a pool that keeps account of it."""
        self.on_written(len(slots))
        if hasattr(self._pool, "mark_written"):
            self._pool.mark_written(slots)

    def _staged(self, rectangle: Rectangle, payload: bytes | memoryview) -> torch.Tensor:
        """The payload as [layers, tokens, 2, heads, head_dim]. Raises ValueError for cells that aren't here, or another
        size."""
        share = self.share
        held = Rectangle(share.layer_start, share.layer_end, 0, rectangle.token_end, share.head_start, share.head_end)
        if held.intersect(rectangle) != rectangle or rectangle.empty:
            raise ValueError(f"{rectangle} is not within {held}")
        raw = torch.frombuffer(payload, dtype=torch.uint8)
        if raw.numel() != self.byte_count(rectangle):
            raise ValueError(f"{raw.numel()} bytes are not those of {rectangle}")
        shape = (rectangle.layers, rectangle.tokens, 2, rectangle.heads, share.head_dim)
        return raw.view(self._pool.store_dtype).view(shape)

    def _buffers(self, rectangle: Rectangle) -> KvBuffers:
        heads = slice(rectangle.head_start - self.share.head_start, rectangle.head_end - self.share.head_start)
        pairs = [self._pool.get_kv_buffer(layer) for layer in range(rectangle.layer_start, rectangle.layer_end)]
        return [(key[:, heads], value[:, heads]) for key, value in pairs]

    def _places(self, rectangle: Rectangle) -> list[KvPlace]:
        """Made once: each would cost some microseconds, which a thread beside the steps takes from them."""
        part = rectangle.layer_start, rectangle.layer_end, rectangle.head_start, rectangle.head_end
        keys = [self._pool.get_kv_buffer(layer)[0] for layer in range(rectangle.layer_start, rectangle.layer_end)]
        known = self._known.get(part)
        if known is None or any(one is not other for one, other in zip(known[0], keys, strict=True)):
            known = keys, [KvPlace.of_buffers(key, value) for key, value in self._buffers(rectangle)]
            self._known[part] = known
        return known[1]


def _has_compiled_copies() -> bool:
    """Also has this process compute checksums in compiled code."""
    if is_available():
        checksum.use(crc32)
    return is_available()


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
