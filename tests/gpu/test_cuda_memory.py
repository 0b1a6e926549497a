"""On a real GPU: units of an arena come and go, and the kernels read and write them by their addresses."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

UNIT_BYTES = 2 << 20


@pytest.fixture
def arena() -> Any:
    from meshift.kv_memory.arena.cuda import CudaArena, CudaVirtualMemory

    torch.cuda.init()
    torch.zeros(1, device="cuda")
    arena = CudaArena(CudaVirtualMemory(torch.cuda.current_device()), 64, UNIT_BYTES)
    yield arena
    arena.close()


def test_memory_really_comes_and_goes(arena: Any) -> None:
    before, _ = torch.cuda.mem_get_info()
    arena.commit(range(64))
    full, _ = torch.cuda.mem_get_info()
    assert before - full >= 60 * UNIT_BYTES
    arena.release(range(0, 64, 2))
    half, _ = torch.cuda.mem_get_info()
    assert half - full >= 30 * UNIT_BYTES


def test_copies_and_attention_over_units(arena: Any) -> None:
    from meshift.kernels import triton_attention
    from meshift.kernels.attention import AttentionBatch, attend_reference
    from meshift.kernels.places import KvPlace
    from meshift.kv_memory.stacking import Stacking

    stacking = Stacking(layers=4, heads=8, head_dim=128, element_bytes=2, unit_bytes=UNIT_BYTES)
    units = [3, 0, 9, 30]
    arena.commit(units)
    pages = torch.tensor(arena.addresses(units).tolist()).cuda()
    places = [
        KvPlace(
            pages=pages,
            page_tokens=stacking.page_tokens,
            key_offset=stacking.key_offset(layer),
            value_offset=stacking.value_offset(layer),
            token_stride=stacking.token_stride,
            head_stride=stacking.head_dim * 2,
            slots=4 * stacking.page_tokens,
            heads=8,
            head_dim=128,
            dtype=torch.bfloat16,
        )
        for layer in range(4)
    ]
    tokens = 4 * stacking.page_tokens
    slots = torch.randperm(tokens)
    content = torch.randn(4, tokens, 2, 8, 128).to(torch.bfloat16).cuda()
    triton_attention.scatter_places(content, slots.cuda(), places)
    back = torch.empty_like(content)
    triton_attention.gather_places(places, slots.cuda(), back)
    assert torch.equal(back, content)
    table = slots.to(torch.int32)[None]
    on_cpu = AttentionBatch(torch.tensor([0, 1, 41]), torch.tensor([tokens, 300]), table, torch.tensor([0, 0]))
    on_gpu = AttentionBatch(*(getattr(on_cpu, name).cuda() for name in AttentionBatch.__slots__))
    query = torch.randn(41, 32, 128).to(torch.bfloat16)
    out = torch.empty_like(query).cuda()
    triton_attention.attend(query.cuda(), places[2], on_gpu, out, 128**-0.5)
    by_slot = torch.empty_like(content[2]).cpu()
    by_slot[slots] = content[2].cpu()
    expected = attend_reference(query, by_slot[:, 0], by_slot[:, 1], on_cpu, 128**-0.5)
    assert float((out.cpu() - expected).abs().max()) < 2e-2
