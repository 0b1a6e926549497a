"""Attention by itself: SGLang's `torch_native` and our kernel, over units of stacked layers and over plain buffers.

One thread, all layers in turn, so that K and V come from memory as in an engine. Each round takes a sample of
`torch_native`, and two of each of our subjects, ABBA or BAAB by turns, so that what changes on the machine meanwhile
meets both. Times are the thread's CPU time, since others may be at work there."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from meshift.kernels.attention import AttentionBatch
from meshift.kernels.cpu.attention import attend
from meshift.kernels.places import KvPlace
from meshift.kv_memory.arena import CpuArena
from meshift.kv_memory.stacking import Stacking, default_unit_bytes

LAYERS, LAYERS_PER_GROUP = 12, 4
HEADS, QUERY_HEADS, HEAD_DIM = 3, 9, 64
"""Of SmolLM2-135M."""

SUBJECTS = ("torch_native", "contiguous", "table")
ORDERS = (
    ("torch_native", "contiguous", "table", "table", "contiguous"),
    ("torch_native", "table", "contiguous", "contiguous", "table"),
)
Run = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A step: `batch` sequences of so many tokens, of which the last `queries` are computed."""

    name: str
    batch: int
    tokens: int
    queries: int = 1


def measure(case: Case, rounds: int, dice: random.Random) -> list[dict[str, Any]]:
    """Samples of each round: CPU milliseconds of a step in all layers. Raises AssertionError where the subjects don't
    agree."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure(case, rounds, dice)
    finally:
        torch.set_num_threads(threads)


def _measure(case: Case, rounds: int, dice: random.Random) -> list[dict[str, Any]]:
    torch.manual_seed(dice.getrandbits(32))
    arenas, samples = list[CpuArena](), list[dict[str, Any]]()
    runs = subjects(case, dice, arenas)
    outputs = [run() for run in runs.values()]
    for output in outputs[1:]:
        assert float((output - outputs[0]).abs().max()) < 1e-4, "the subjects don't agree"
    for number in range(rounds):
        for name in ORDERS[number % 2]:
            begin = time.thread_time()
            runs[name]()
            ms = (time.thread_time() - begin) * 1e3
            samples.append({"case": case.name, "round": number, "subject": name, "ms": ms})
    for arena in arenas:
        arena.close()
    return samples


def subjects(case: Case, dice: random.Random, arenas: list[CpuArena]) -> dict[str, Run]:
    """What is compared, on the same K, V and queries; each gives the output of the last layer. `arenas` gets those that
    must be closed in the end."""
    sizes = {"heads": HEADS, "head_dim": HEAD_DIM, "element_bytes": 4}
    unit_bytes = default_unit_bytes(**sizes, layers_per_group=LAYERS_PER_GROUP)
    stacking = Stacking(layers=LAYERS, **sizes, layers_per_group=LAYERS_PER_GROUP, unit_bytes=unit_bytes)
    pages = case.batch * -(-case.tokens // stacking.page_tokens)
    slots = pages * stacking.page_tokens
    buffers = [tuple(torch.randn(2, slots, HEADS, HEAD_DIM)) for _ in range(LAYERS)]
    query = torch.randn(case.batch * case.queries, QUERY_HEADS, HEAD_DIM)
    in_order = _batch(case, list(range(pages)), stacking.page_tokens)
    order = dice.sample(range(pages), pages)
    scattered = _batch(case, order, stacking.page_tokens)
    stacked = _stacked_places(stacking, buffers, order, arenas)
    plain = [KvPlace.of_buffers(key, value) for key, value in buffers]
    return {
        "torch_native": _native(case, buffers, query, in_order),
        "contiguous": _ours(plain, query, in_order),
        "table": _ours(stacked, query, scattered),
    }


def _batch(case: Case, order: list[int], page_tokens: int) -> AttentionBatch:
    """The sequences fill pages in the order given."""
    first = torch.tensor(order, dtype=torch.int32)[:, None] * page_tokens
    table = (first + torch.arange(page_tokens, dtype=torch.int32)).view(case.batch, -1)
    starts = torch.arange(case.batch + 1) * case.queries
    return AttentionBatch(starts, torch.full((case.batch,), case.tokens), table, torch.arange(case.batch))


def _stacked_places(stacking: Stacking, buffers: list[Any], order: list[int], arenas: list[CpuArena]) -> list[KvPlace]:
    """Page `order[i]` holds what page i of the buffers does; each page of a group is a unit of an arena."""
    places = []
    for layer in range(LAYERS):
        if layer % LAYERS_PER_GROUP == 0:
            arena = CpuArena(len(order), stacking.unit_bytes)
            arena.commit(range(arena.units))
            arenas.append(arena)
        memory = arenas[-1].bytes.view(torch.float32)
        shape = (len(order) * stacking.page_tokens, LAYERS_PER_GROUP, 2, HEADS, HEAD_DIM)
        view = memory.view(len(order), -1)[:, : stacking.page_tokens * shape[1] * 2 * HEADS * HEAD_DIM]
        by_slot = view.view(len(order), stacking.page_tokens, *shape[1:])
        for which, buffer in enumerate(buffers[layer]):
            by_slot[order, :, layer % LAYERS_PER_GROUP, which] = buffer.view(len(order), -1, HEADS, HEAD_DIM)
        places.append(
            KvPlace(
                pages=torch.from_numpy(arenas[-1].addresses(range(len(order)))),
                page_tokens=stacking.page_tokens,
                key_offset=stacking.key_offset(layer),
                value_offset=stacking.value_offset(layer),
                token_stride=stacking.token_stride,
                head_stride=HEAD_DIM * 4,
                slots=shape[0],
                heads=HEADS,
                head_dim=HEAD_DIM,
                dtype=torch.float32,
            )
        )
    return places


def _ours(places: list[KvPlace], query: torch.Tensor, batch: AttentionBatch) -> Run:
    out = torch.empty_like(query)

    def run() -> torch.Tensor:
        for place in places:
            attend(query, place, batch, out, HEAD_DIM**-0.5)
        return out

    return run


def _native(case: Case, buffers: list[Any], query: torch.Tensor, batch: AttentionBatch) -> Run:
    """SGLang's backend itself, on buffers as SGLang has them."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.radix_attention import AttentionType

    pool = SimpleNamespace(
        get_key_buffer=lambda layer: buffers[layer][0], get_value_buffer=lambda layer: buffers[layer][1]
    )
    rows = SimpleNamespace(req_to_token=batch.slots)
    backend = TorchNativeAttnBackend(SimpleNamespace(device="cpu", token_to_kv_pool=pool, req_to_token_pool=rows))
    counts = torch.full((case.batch,), case.queries)
    step = SimpleNamespace(
        req_pool_indices=batch.rows, seq_lens=batch.lengths, extend_seq_lens=counts, encoder_lens=None,
        extend_prefix_lens=batch.lengths - counts, out_cache_loc=None, encoder_out_cache_loc=None,
    )  # fmt: skip
    layers = [
        SimpleNamespace(
            layer_id=layer, tp_q_head_num=QUERY_HEADS, tp_k_head_num=HEADS, qk_head_dim=HEAD_DIM, v_head_dim=HEAD_DIM,
            is_cross_attention=False, sliding_window_size=-1, scaling=HEAD_DIM**-0.5, attn_type=AttentionType.DECODER,
        )
        for layer in range(LAYERS)
    ]  # fmt: skip
    forward = backend.forward_decode if case.queries == 1 else backend.forward_extend
    flat = query.view(len(query), -1)

    def run() -> torch.Tensor:
        outputs = [forward(flat, None, None, layer, step, save_kv_cache=False) for layer in layers]
        last: torch.Tensor = outputs[-1].view_as(query)
        return last

    return run
