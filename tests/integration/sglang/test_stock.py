"""Our pools and our attention beside SGLang's own pool and `torch_native`, on the same steps of layers of random
contents: prefills, chunks behind a prefix, decode steps. Without an engine."""

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshift.backends.sglang.plugin.activate import LAYERS_PER_GROUP_VARIABLE

pytestmark = [pytest.mark.sglang]

SLOTS, PAGE, ROWS, TOKENS_MAX = 1280, 64, 4, 180
"""A page fills whole units of each shape and stacking."""

ERROR_MAX = 2e-5

SHAPES = {"smollm2": (6, 3, 9, 64), "odd": (7, 5, 15, 24), "one head": (5, 1, 4, 40)}
"""Layers, KV heads, query heads, elements of a head."""


class Side:
    """A pool and the backend that attends over it."""

    def __init__(self, pool: Any, backend: Any) -> None:
        self.pool, self.backend = pool, backend

    def step(self, model: "Model", batch: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Each layer's output."""
        self.backend.init_forward_metadata(batch)
        forward = self.backend.forward_decode if batch.forward_mode.is_decode() else self.backend.forward_extend
        return [
            forward(*(part.clone() for part in layer_inputs), layer, batch)
            for layer, layer_inputs in zip(model.layers, inputs, strict=True)
        ]


class Model:
    """Requests that grow on pages in random order."""

    def __init__(self, shape: tuple[int, int, int, int], dice: random.Random) -> None:
        from sglang.srt.layers.radix_attention import AttentionType

        self.layer_count, self.heads, self.query_heads, self.dim = shape
        self.dice = dice
        self.table = torch.zeros(ROWS, TOKENS_MAX + PAGE, dtype=torch.int32)
        self.lengths = [0] * ROWS
        pages = dice.sample(range(1, SLOTS // PAGE + 1), SLOTS // PAGE)
        self.pages: Iterator[int] = iter(pages)
        self.layers = [
            SimpleNamespace(
                layer_id=layer, tp_q_head_num=self.query_heads, tp_k_head_num=self.heads, tp_v_head_num=self.heads,
                qk_head_dim=self.dim, v_head_dim=self.dim, is_cross_attention=False, sliding_window_size=-1,
                scaling=self.dim**-0.5, attn_type=AttentionType.DECODER, k_scale=None, v_scale=None,
            )
            for layer in range(self.layer_count)
        ]  # fmt: skip

    def pool(self, cls: Any) -> Any:
        return cls(
            size=SLOTS, page_size=PAGE, dtype=torch.float32, head_num=self.heads, head_dim=self.dim,
            layer_num=self.layer_count, device="cpu", enable_memory_saver=False, start_layer=0,
            end_layer=self.layer_count,
        )  # fmt: skip

    def side(self, pool: Any, backend: Any) -> Side:
        rows = SimpleNamespace(req_to_token=self.table)
        return Side(pool, backend(SimpleNamespace(device="cpu", token_to_kv_pool=pool, req_to_token_pool=rows)))

    def grow(self, row: int, count: int) -> list[int]:
        """Slots of the next tokens of a request."""
        begin, end = self.lengths[row], self.lengths[row] + count
        for token in range(-(-begin // PAGE) * PAGE, end, PAGE):
            first = next(self.pages) * PAGE
            self.table[row, token : token + PAGE] = torch.arange(first, first + PAGE, dtype=torch.int32)
        self.lengths[row] = end
        slots: list[int] = self.table[row, begin:end].tolist()
        return slots

    def batch(self, counts: dict[int, int], *, decodes: bool) -> Any:
        """As much of SGLang's forward batch as both backends read."""
        befores = [self.lengths[row] for row in counts]
        slots = [slot for row, count in counts.items() for slot in self.grow(row, count)]
        return SimpleNamespace(
            forward_mode=SimpleNamespace(is_decode=lambda: decodes, is_extend=lambda: not decodes),
            encoder_lens=None, spec_info=None, encoder_out_cache_loc=None,
            seq_lens=torch.tensor([self.lengths[row] for row in counts]), req_pool_indices=torch.tensor(list(counts)),
            extend_seq_lens=torch.tensor(list(counts.values())), extend_prefix_lens=torch.tensor(befores),
            out_cache_loc=torch.tensor(slots),
        )  # fmt: skip

    def inputs(self, tokens: int) -> list[torch.Tensor]:
        """q, k and v of each layer, as a projection gives them: parts of one tensor."""
        made: list[Any] = []
        for _ in range(self.layer_count):
            widths = [self.query_heads * self.dim, self.heads * self.dim, self.heads * self.dim]
            query, key, value = torch.split(torch.randn(tokens, sum(widths)), widths, dim=-1)
            shape = (tokens, self.heads, self.dim)
            made.append((query.contiguous(), key.reshape(shape), value.view(shape)))
        return made


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors: to wake a second thread costs more than it brings."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("k", [None, 1, 2, 4, 8])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_same_as_stock(shape: tuple[int, int, int, int], k: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from meshift.backends.sglang.plugin.attention import MeshCpuAttention
    from meshift.backends.sglang.plugin.pool import pool_class

    seed = random.randrange(2**32)
    print(f"seed {seed}")
    torch.manual_seed(seed)
    if k is None:
        monkeypatch.delenv(LAYERS_PER_GROUP_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(LAYERS_PER_GROUP_VARIABLE, str(k))
    model = Model(shape, random.Random(seed))
    stock = model.side(model.pool(MHATokenToKVPool), TorchNativeAttnBackend)
    ours = model.side(model.pool(pool_class()), MeshCpuAttention)
    for number in range(7):
        decodes = number > 0 and number % 3 != 0
        rows = [row for row in range(ROWS) if not decodes or model.lengths[row]]
        counts = {row: 1 if decodes else model.dice.choice((1, 7, 40)) for row in rows}
        batch = model.batch(counts, decodes=decodes)
        inputs = model.inputs(sum(counts.values()))
        for mine, its in zip(ours.step(model, batch, inputs), stock.step(model, batch, inputs), strict=True):
            assert float((mine - its).abs().max()) < ERROR_MAX
    for layer in range(model.layer_count):
        held = torch.cat([model.table[row, : model.lengths[row]] for row in range(ROWS)]).long()
        for mine, its in zip(ours.pool.get_kv_buffer(layer), stock.pool.get_kv_buffer(layer), strict=True):
            assert torch.equal(mine[held], its[held])
