"""When two streams of one request may differ: where the engine's arithmetic had two tokens so close together that the
last bits of a sum decide, and sums were taken in another order.

A token is the one with the greatest score: its log-probability, and, if the request is sampled, the random number that
follows from seed, position and token. Log-probabilities of the two computations differ by rounding, by no more than
`MARGIN`. If one stream has `a` where the other has `b`, then `score(a) >= score(b)` in the first and the reverse in
the second, so that the first's score of `a` and the second's of `b` are as close. Anything else that makes streams
differ (KV of another request, a lost penalty, another seed) moves scores by whole units: of a thousand such
differences, fewer than one passes for a near tie.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from meshift.backends.sglang.plugin.gumbel import gumbel_noise
from meshift.schemas.requests import Sampling, TokenLogprob

MARGIN = 1e-4
"""Of the small random model; a deep one's numbers are larger, and summed more often."""


@dataclass(frozen=True)
class Given:
    """What a stream gave, from some index on: tokens, each with its log-probability."""

    tokens: Sequence[int]
    logprobs: Sequence[TokenLogprob]

    def since(self, index: int) -> "Given":
        """Without the first so many."""
        return Given(self.tokens[index:], self.logprobs[index:])


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first index at which they differ; None if they are equal."""
    if list(one) == list(other):
        return None
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


def check_same(
    one: Given,
    other: Given,
    sampling: Sampling,
    known: int,
    what: object,
    *,
    exact_until: int = 0,
    margin: float = MARGIN,
) -> bool:
    """Assert that both streams are the same, with the same log-probabilities, up to a proven near tie at the earliest
    at index `exact_until`. `known`: tokens before them, of prompt and earlier output. Whether they are the same."""
    assert len(one.logprobs) == len(one.tokens), f"{what}: no log-probability of each token"
    assert len(other.logprobs) == len(other.tokens), f"{what}: no log-probability of each token"
    for given in (one, other):
        check_chosen(given, sampling, known, what, margin)
    index = first_difference(one.tokens, other.tokens)
    for mine, its in zip(one.logprobs[:index], other.logprobs[:index], strict=True):
        assert abs(mine.value - its.value) <= margin, what
    if index is None:
        return True
    where = f"{what}: token {index} of {len(one.tokens)} and {len(other.tokens)}"
    assert index >= exact_until, f"{where} differs, and nothing was computed anew before {exact_until}"
    assert index < min(len(one.tokens), len(other.tokens)), f"{where}: one stream ends"
    scores = [score(given, index, sampling, known) for given in (one, other)]
    assert abs(scores[0] - scores[1]) <= margin, f"{where}: {one.tokens[index]} and {other.tokens[index]}: {scores}"
    print(f"near tie: {where}: {scores}")
    return False


def check_chosen(given: Given, sampling: Sampling, known: int, what: object, margin: float) -> None:
    """Assert that no token which the stream names beside a chosen one has a greater score: that scores are what these
    functions take them for. Filters that leave out likely tokens aren't known here."""
    for index, logprob in enumerate(given.logprobs):
        mine = score(given, index, sampling, known)
        for token, value in logprob.top:
            rival = score(Given([token], [TokenLogprob(value)]), 0, sampling, known + index)
            assert rival <= mine + margin, f"{what}: token {index} was chosen, but not by this seed and position"


def score(given: Given, index: int, sampling: Sampling, known: int) -> float:
    """Of a token that was chosen."""
    value = given.logprobs[index].value
    if sampling.temperature == 0.0:
        return value
    assert sampling.seed is not None, "without a seed nothing is to be compared"
    token = torch.tensor([[given.tokens[index]]])
    # A token is drawn at the position of the token before it.
    noise = gumbel_noise(torch.tensor([sampling.seed]), torch.tensor([known + index - 1]), token)
    return value + float(noise)
