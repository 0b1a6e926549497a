"""What flash-attn is given: a stand-in, which holds it to its contract, computes the same as the reference."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from meshift.kernels import flash_attention  # noqa: E402
from meshift.kernels.attention import AttentionBatch, attend_reference  # noqa: E402
from meshift.kernels.flash_attention import PAGE_STEP, FlashBatch, attend, blocks, problem  # noqa: E402

HEADS, GROUP, DIM, PAGES = 2, 3, 16, 6


def stand_in(q: Any, k: Any, v: Any, **arguments: Any) -> Any:
    """As flash_attn_varlen_func with a table of pages: checks as its C++ does, and attends by the table alone."""
    starts, key_starts = arguments["cu_seqlens_q"], arguments["cu_seqlens_k"]
    table = arguments["block_table"]
    assert q.dtype in flash_attention.TYPES
    assert k.dtype == v.dtype == q.dtype
    assert all(one.dtype == torch.int32 and one.is_contiguous() for one in (starts, key_starts))
    assert (table.dtype, table.stride(-1)) == (torch.int32, 1)
    assert k.stride(-1) == v.stride(-1) == q.stride(-1) == 1
    assert k.dim() == v.dim() == 4
    assert k.shape[1] % PAGE_STEP == 0
    assert arguments["causal"] is True
    lengths = (key_starts[1:] - key_starts[:-1]).tolist()
    assert arguments["max_seqlen_k"] == max(lengths)
    assert arguments["max_seqlen_q"] == int((starts[1:] - starts[:-1]).max())
    out = torch.empty_like(q)
    for index, length in enumerate(lengths):
        assert int(table[index].min()) >= 0
        assert int(table[index].max()) < len(k)
        pages = table[index, : -(-length // k.shape[1])].long()
        keys, values = (one[pages].flatten(0, 1)[:length] for one in (k, v))
        begin, end = starts[index : index + 2].tolist()
        alone = AttentionBatch(
            torch.tensor([0, end - begin]),
            torch.tensor([length]),
            torch.arange(length, dtype=torch.int32)[None],
            torch.tensor([0]),
        )
        out[begin:end] = attend_reference(q[begin:end], keys, values, alone, arguments["softmax_scale"])
    return out


@pytest.mark.parametrize("queries", [(1, 1, 1), (40, 1, 300)], ids=["decode", "mixed"])
def test_the_same_as_the_reference(queries: tuple[int, ...]) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    lengths = [300, 1, 513]
    stack = torch.randn(PAGES * PAGE_STEP, 4, 2, HEADS, DIM, generator=generator).to(torch.bfloat16)
    key, value = stack[:, 2, 0], stack[:, 2, 1]
    order = torch.randperm(PAGES, generator=generator)
    table = torch.full((3, 600), 2**31 - 1, dtype=torch.int32)
    taken = 0
    for row, length in enumerate(lengths):
        count = -(-length // PAGE_STEP)
        slots = (order[taken : taken + count, None] * PAGE_STEP + torch.arange(PAGE_STEP)).flatten()
        table[row, :length] = slots[:length].to(torch.int32)
        taken += count
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()])
    batch = AttentionBatch(starts, torch.tensor(lengths), table, torch.arange(3))
    query = torch.randn(sum(queries), GROUP * HEADS, DIM, generator=generator).to(torch.bfloat16)
    for one, whole in ((blocks(key, PAGE_STEP), key), (blocks(value, PAGE_STEP), value)):
        assert one.data_ptr() == whole.data_ptr()
        assert one.shape == (PAGES, PAGE_STEP, HEADS, DIM)
    out = attend(
        stand_in, query, blocks(key, PAGE_STEP), blocks(value, PAGE_STEP), FlashBatch.of(batch, PAGE_STEP), 0.25
    )
    assert torch.equal(out, attend_reference(query, key, value, batch, 0.25))


@pytest.mark.parametrize(
    ("page_tokens", "head_dim", "dtype", "said"),
    [
        (16, 64, "bfloat16", "multiple of 256, such as 256, not 16"),
        (300, 64, "float16", "such as 512"),
        (256, 512, "bfloat16", "at most 256 elements"),
        (256, 64, "float32", "not float32"),
        (512, 256, "bfloat16", ""),
    ],
)
def test_what_it_serves(page_tokens: int, head_dim: int, dtype: str, said: str) -> None:
    found = problem(page_tokens, head_dim, getattr(torch, dtype))
    assert said in found
    assert bool(said) == bool(found)


def test_the_kernel_is_flash_attns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=stand_in))
    assert flash_attention.paged_kernel() is stand_in
    monkeypatch.setitem(__import__("sys").modules, "flash_attn", None)
    with pytest.raises(ImportError):
        flash_attention.paged_kernel()
