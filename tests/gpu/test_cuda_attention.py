"""On a real GPU: the pool over the CUDA arena, and both attention backends on it, against the reference."""

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

HEADS, QUERY_HEADS, DIM, LAYERS, K = 8, 32, 128, 6, 4


def make_pool(monkeypatch: pytest.MonkeyPatch, page_tokens: int) -> Any:
    pytest.importorskip("sglang")
    from meshift.backends.sglang.plugin.activate import LAYERS_PER_GROUP_VARIABLE
    from meshift.backends.sglang.plugin.cuda_pool import CudaArenaKvPool

    monkeypatch.setenv(LAYERS_PER_GROUP_VARIABLE, str(K))
    return CudaArenaKvPool(
        size=page_tokens * 7,
        page_size=page_tokens,
        dtype=torch.bfloat16,
        head_num=HEADS,
        head_dim=DIM,
        layer_num=LAYERS,
        device="cuda",
        enable_memory_saver=False,
        start_layer=0,
        end_layer=LAYERS,
    )


def test_units_of_a_pool_come_and_go_under_its_views(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool(monkeypatch, 128)
    slots = torch.tensor([3, 300, 700], device="cuda")
    layer = SimpleNamespace(layer_id=5)
    key, value = torch.randn(2, 3, HEADS, DIM, device="cuda").to(torch.bfloat16)
    pool.set_kv_buffer(layer, slots, key, value)
    full, _ = torch.cuda.mem_get_info()
    assert pool.give_up_pages([1, 3, 4]) == 6 * pool.stacking.unit_bytes
    less, _ = torch.cuda.mem_get_info()
    assert less - full >= 5 * pool.stacking.unit_bytes
    assert torch.equal(pool.get_key_buffer(5)[slots], key)
    pool.take_back_pages([1, 3, 4])
    again = torch.tensor([128, 400], device="cuda")
    pool.set_kv_buffer(layer, again, key[:2], value[:2])
    assert torch.equal(pool.get_value_buffer(5)[again], value[:2])
    pool.move_kv_cache(torch.tensor([5], device="cuda"), torch.tensor([300], device="cuda"))
    assert torch.equal(pool.get_key_buffer(5)[5], key[1])


@pytest.mark.parametrize(("name", "page_tokens"), [("TritonAttention", 128), ("FlashAttention", 256)])
@pytest.mark.parametrize("counts", [(1, 1), (60, 90)], ids=["decode", "extend"])
def test_attention(name: str, page_tokens: int, counts: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "FlashAttention":
        pytest.importorskip("flash_attn", reason="flash-attn isn't installed")
    pool = make_pool(monkeypatch, page_tokens)
    from sglang.srt.layers.radix_attention import AttentionType

    from meshift.backends.sglang.plugin import cuda_attention
    from meshift.kernels.attention import AttentionBatch, attend_reference

    pages = torch.arange(page_tokens * 8, dtype=torch.int32).view(-1, page_tokens)
    table = torch.zeros(2, 3 * page_tokens, dtype=torch.int32)
    table[0], table[1, :page_tokens] = torch.cat([pages[6], pages[1], pages[3]]), pages[2]
    lengths = [2 * page_tokens + 17, 90]
    everything = torch.arange(page_tokens * 8, device="cuda")
    layer = SimpleNamespace(
        layer_id=5, tp_q_head_num=QUERY_HEADS, tp_k_head_num=HEADS, tp_v_head_num=HEADS, qk_head_dim=DIM,
        v_head_dim=DIM, is_cross_attention=False, sliding_window_size=-1, scaling=DIM**-0.5, k_scale=None,
        v_scale=None, attn_type=AttentionType.DECODER,
    )  # fmt: skip
    content = torch.randn(2, len(everything), HEADS, DIM, device="cuda").to(torch.bfloat16)
    pool.set_kv_buffer(layer, everything, content[0], content[1])
    runner = SimpleNamespace(
        device="cuda", token_to_kv_pool=pool, req_to_token_pool=SimpleNamespace(req_to_token=table.cuda())
    )
    backend = getattr(cuda_attention, name)(runner)
    decodes = max(counts) == 1
    step = SimpleNamespace(
        forward_mode=SimpleNamespace(is_decode=lambda: decodes, is_extend=lambda: not decodes),
        encoder_lens=None,
        spec_info=None,
        seq_lens=torch.tensor(lengths).cuda(),
        extend_seq_lens=torch.tensor(counts).cuda(),
        req_pool_indices=torch.arange(2).cuda(),
        out_cache_loc=None,
    )
    backend.init_forward_metadata(step)
    query = torch.randn(sum(counts), QUERY_HEADS * DIM).to(torch.bfloat16)
    forward = backend.forward_decode if decodes else backend.forward_extend
    out = forward(query.cuda(), None, None, layer, step, save_kv_cache=False)
    starts = torch.tensor([0, counts[0], sum(counts)])
    batch = AttentionBatch(starts, torch.tensor(lengths), table, torch.arange(2))
    expected = attend_reference(
        query.view(-1, QUERY_HEADS, DIM), content[0].cpu(), content[1].cpu(), batch, layer.scaling
    )
    assert float((out.cpu().view_as(expected) - expected).abs().max()) < 2e-2
