"""What passes for a near tie, and what doesn't."""

import pytest
import torch

from meshift.backends.sglang.plugin.gumbel import choose, gumbel_noise
from meshift.schemas.requests import Sampling, TokenLogprob
from tests.integration.sglang.near_ties import MARGIN, Given, check_same, first_difference

KNOWN = 7
GREEDY = Sampling(max_new_tokens=9, temperature=0.0)
SEEDED = Sampling(max_new_tokens=9, temperature=1.0, seed=5)


def given(tokens: list[int], values: list[float]) -> Given:
    return Given(tokens, [TokenLogprob(value) for value in values])


def sampled(logits: torch.Tensor, seed: int = 5) -> Given:
    """As the sampler chooses: a row of `logits` for each token, at the positions from `KNOWN` on."""
    weights = torch.softmax(logits.to(torch.float64), dim=1)
    rows, vocabulary = logits.shape
    candidates = torch.arange(vocabulary).expand(rows, -1)
    positions = torch.arange(rows) + KNOWN - 1
    tokens = choose(weights, candidates, torch.full((rows,), seed), positions).tolist()
    return given(tokens, [float(torch.log(weights[row, token])) for row, token in enumerate(tokens)])


def test_first_difference() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_the_same() -> None:
    assert check_same(given([1, 2], [-1.0, -2.0]), given([1, 2], [-1.0, -2.0 + MARGIN / 2]), GREEDY, KNOWN, "")


def test_a_greedy_near_tie() -> None:
    one, other = given([1, 2, 3], [-1.0, -2.0, -3.0]), given([1, 4, 5], [-1.0, -2.0 - MARGIN / 2, -1.0])
    assert not check_same(one, other, GREEDY, KNOWN, "")
    with pytest.raises(AssertionError, match="nothing was computed anew"):
        check_same(one, other, GREEDY, KNOWN, "", exact_until=2)


@pytest.mark.parametrize(
    "other",
    [
        given([1, 4, 5], [-1.0, -2.01, -1.0]),
        given([1, 2, 3], [-1.0, -2.01, -3.0]),
        given([1, 2], [-1.0, -2.0]),
        Given([1, 2, 3], [TokenLogprob(-1.0)]),
    ],
    ids=["no tie", "other values", "cut short", "values missing"],
)
def test_what_is_no_near_tie(other: Given) -> None:
    with pytest.raises(AssertionError):
        check_same(given([1, 2, 3], [-1.0, -2.0, -3.0]), other, GREEDY, KNOWN, "")


def test_a_sampled_near_tie_is_one_of_scores() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(3))
    noise = gumbel_noise(torch.tensor([5]), torch.tensor([KNOWN - 1]), torch.arange(50).unsqueeze(0))
    second, first = torch.argsort((logits + noise)[0])[-2:].tolist()
    gap = float((logits + noise)[0, first] - (logits + noise)[0, second])
    assert gap > 100 * MARGIN

    def lowered(by: float) -> Given:
        """The likeliest token is so much less likely."""
        return sampled(logits - by * torch.nn.functional.one_hot(torch.tensor([first]), 50))

    near, over, far = (lowered(gap + by) for by in (-MARGIN / 4, MARGIN / 4, 10 * MARGIN))
    assert (near.tokens, over.tokens, far.tokens) == ([first], [second], [second])
    assert not check_same(near, over, SEEDED, KNOWN, "")
    with pytest.raises(AssertionError):
        check_same(lowered(0.0), over, SEEDED, KNOWN, "")


def test_chosen_by_other_numbers() -> None:
    """Where the likeliest tokens are given too, the chosen one's score is looked at."""
    logits = torch.randn(40, 8, generator=torch.Generator().manual_seed(3))
    plain = sampled(logits)
    tops = [
        TokenLogprob(one.value, tuple(enumerate(torch.log_softmax(row.to(torch.float64), 0).tolist())))
        for one, row in zip(plain.logprobs, logits, strict=True)
    ]
    whole = Given(plain.tokens, tops)
    assert check_same(whole, whole, SEEDED, KNOWN, "")
    with pytest.raises(AssertionError, match="not by this seed"):
        check_same(whole, whole, SEEDED, KNOWN + 1, "")


def test_another_seed_is_no_near_tie() -> None:
    logits, caught = torch.zeros(200, 50), 0
    for row in range(200):
        one, other = sampled(logits[row : row + 1], seed=5), sampled(logits[row : row + 1], seed=row + 100)
        if one.tokens != other.tokens:
            with pytest.raises(AssertionError):
                check_same(one, other, SEEDED, KNOWN, "")
            caught += 1
    assert caught > 150
