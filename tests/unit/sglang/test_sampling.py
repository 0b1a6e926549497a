"""The sampler by itself: right distribution, and numbers that depend on seed, position and token alone."""

import pytest
import torch

from meshift.backends.sglang.plugin.gumbel import choose, filter_candidates, gumbel_noise
from meshift.backends.sglang.plugin.penalties import counted_tokens
from meshift.backends.sglang.plugin.sampling import sample_filtered, sample_plain

ROWS = 40_000
CHI_SQUARE_MAX = 40.0
"""Seven degrees of freedom; chance exceeds this once in a million."""


def must_not_be_called(*args: object, **kwargs: object) -> torch.Tensor:
    raise AssertionError("SGLang's own sampler was asked")


def draw(probs: torch.Tensor, rows: int = ROWS) -> torch.Tensor:
    """How often each token is chosen, over as many positions of one seed."""
    positions = torch.arange(rows)
    tokens = sample_plain(must_not_be_called, probs.expand(rows, -1), torch.full((rows,), 5), positions)
    return torch.bincount(tokens.to(torch.int64), minlength=probs.shape[-1])


def test_distribution() -> None:
    probs = torch.tensor([[0.4, 0.25, 0.15, 0.1, 0.05, 0.03, 0.015, 0.005]])
    expected = probs[0] * ROWS
    chi_square = ((draw(probs) - expected) ** 2 / expected).sum()
    assert chi_square < CHI_SQUARE_MAX


def test_neighbouring_seeds_and_positions_are_unrelated() -> None:
    tokens = torch.arange(64).expand(2000, -1)
    numbers = torch.arange(2000)
    by_seed = gumbel_noise(numbers, torch.zeros_like(numbers), tokens)
    by_position = gumbel_noise(torch.zeros_like(numbers), numbers, tokens)
    for noise in (by_seed, by_position):
        assert abs(float(noise.mean()) - 0.5772) < 0.02
        assert abs(float(torch.corrcoef(noise[:, :2].T)[0, 1])) < 0.1
        assert abs(float(torch.corrcoef(torch.stack((noise[:-1, 0], noise[1:, 0])))[0, 1])) < 0.1
    assert torch.isfinite(by_seed).all()


def test_zero_weight_is_never_chosen() -> None:
    assert draw(torch.tensor([[0.0, 1.0, 0.0]])).tolist() == [0, ROWS, 0]


def test_batch_and_order_don_t_matter() -> None:
    generator = torch.Generator().manual_seed(0)
    probs = torch.softmax(torch.randn(6, 500, generator=generator), dim=1)
    seeds, positions = torch.arange(6) * 7, torch.arange(6) + 100
    together = sample_plain(must_not_be_called, probs, seeds, positions)
    shuffled = torch.tensor([3, 1, 5, 0, 2, 4])
    again = sample_plain(must_not_be_called, probs[shuffled], seeds[shuffled], positions[shuffled])
    assert again.tolist() == together[shuffled].tolist()
    tokens = torch.arange(500).flip(0).expand(6, -1)
    reordered = choose(probs.flip(1), tokens, seeds, positions)
    assert reordered.tolist() == together.tolist()


@pytest.mark.parametrize("bound", [None, 6, 3])
def test_filters(bound: int | None) -> None:
    probs = torch.tensor([[0.05, 0.4, 0.1, 0.25, 0.15, 0.05], [0.3, 0.1, 0.1, 0.2, 0.1, 0.2]])
    top_ks, top_ps = torch.tensor([3, 3]), torch.tensor([0.6, 1.0])
    weights, tokens = filter_candidates(probs, top_ks, top_ps, None, bound)
    kept = [sorted(row[mask].tolist()) for row, mask in zip(tokens, weights > 0, strict=True)]
    assert kept == [[1, 3], [0, 3, 5]]
    weights, tokens = filter_candidates(probs, top_ks, top_ps, torch.tensor([0.7, 0.9]), bound)
    assert [int(row.sum()) for row in weights > 0] == [1, 1]


def test_filtered_choice_stays_inside_the_filter() -> None:
    probs = torch.softmax(torch.randn(1, 100, generator=torch.Generator().manual_seed(1)), dim=1).expand(500, -1)
    best = set(torch.topk(probs[0], 5).indices.tolist())
    chosen = sample_filtered(
        must_not_be_called,
        probs,
        torch.full((500,), 5),
        torch.ones(500),
        torch.zeros(500),
        True,
        torch.full((500,), 9),
        torch.arange(500),
    )
    assert set(chosen.tolist()) == best


def test_unseeded_is_left_to_sglang() -> None:
    marker = torch.tensor([1])
    assert sample_plain(lambda *args: marker, torch.ones(1, 2), None, None) is marker


def test_what_the_penalizers_have_counted() -> None:
    assert counted_tokens([1, 2], [], overlap=True) == []
    assert counted_tokens([1, 2], [5, 6, 7], overlap=False) == [5, 6, 7]
    assert counted_tokens([1, 2], [5, 6, 7], overlap=True) == [2, 5, 6]
