"""The Triton kernels under Triton's interpreter, on CPU tensors: small shapes, since it is slow. Run by
`test_triton.py` in a process of its own, with `TRITON_INTERPRET=1` before Triton is imported."""

import random

import pytest
import torch

from meshift.kernels import triton_attention as kernels
from meshift.kernels.attention import attend_reference
from tests.unit.kernels.paged_case import PagedCase


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("lengths", "query_lengths"), [([40, 1, 33], [1, 1, 1]), ([35, 20], [18, 1])], ids=["decode", "extend"]
)
def test_attention(dtype: str, lengths: list[int], query_lengths: list[int]) -> None:
    case = PagedCase.make(lengths, query_lengths, page_tokens=6, heads=2, group=3, dim=20, dtype=getattr(torch, dtype))
    out = torch.full_like(case.query, torch.nan)
    kernels.attend(case.query, case.place(1), case.batch, out, 0.25)
    key, value = case.whole(1)
    expected = attend_reference(case.query, key, value, case.batch, 0.25)
    assert float((out - expected).abs().max()) < (1e-5 if dtype == "float32" else 2e-2)


def test_long_sequences_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of one part, one that fills its last one, one that doesn't."""
    monkeypatch.setattr(kernels, "PART_TOKENS", 16)
    monkeypatch.setattr(kernels, "BLOCK_TOKENS", 8)
    case = PagedCase.make([7, 48, 50], [1, 1, 1], page_tokens=6, heads=2, group=3, dim=20, dtype=torch.float32)
    out = torch.full_like(case.query, torch.nan)
    kernels.attend(case.query, case.place(0), case.batch, out, 0.25, 1, 50)
    expected = attend_reference(case.query, *case.whole(0), case.batch, 0.25)
    assert float((out - expected).abs().max()) < 1e-5


@pytest.mark.parametrize("group", [1, 8, 20])
def test_groups_of_heads(group: int) -> None:
    for query_lengths in ([1], [70]):
        case = PagedCase.make([75], query_lengths, page_tokens=16, heads=1, group=group, dim=16, dtype=torch.float32)
        out = torch.full_like(case.query, torch.nan)
        kernels.attend(case.query, case.place(0), case.batch, out, 0.25)
        expected = attend_reference(case.query, *case.whole(0), case.batch, 0.25)
        assert float((out - expected).abs().max()) < 1e-5


def test_copies_pass_bytes() -> None:
    case = PagedCase.make([30], [1], page_tokens=4, heads=3, group=1, dim=10, dtype=torch.bfloat16)
    slots = torch.tensor(random.Random(3).sample(range(case.slots), 9))
    places = [case.place(0), case.place(1)]
    out = torch.empty(2, 9, 2, 3, 10, dtype=torch.bfloat16)
    kernels.gather_places(places, slots, out)
    for layer in range(2):
        for which, whole in enumerate(case.whole(layer)):
            assert torch.equal(out[layer, :, which], whole[slots])
    before = [block.clone() for block in case.blocks]
    fresh = torch.randn(out.shape).to(torch.bfloat16)
    kernels.scatter_places(fresh, slots, places)
    again = torch.empty_like(out)
    kernels.gather_places(places, slots, again)
    assert torch.equal(again, fresh)
    others = torch.tensor(sorted(set(range(case.slots)) - set(slots.tolist())))
    assert torch.equal(torch.cat(before)[others], torch.cat(case.blocks)[others])


def test_refusals() -> None:
    case = PagedCase.make([3], [1], page_tokens=4, heads=1, group=1, dim=8, dtype=torch.float32)
    with pytest.raises(ValueError, match="fit"):
        kernels.attend(case.query.double(), case.place(0), case.batch, case.query.double(), 1.0)
    with pytest.raises(ValueError, match="staging"):
        kernels.gather_places([case.place(0)], torch.tensor([1]), torch.empty(1, 2, 2, 1, 8))
