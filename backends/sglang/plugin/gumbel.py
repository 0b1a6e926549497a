"""Random choice that depends on (seed, position, token) alone: not on the batch, the rank, the device, or on what
was drawn before. So a resumed or moved request goes on with the numbers that it would have got anyway."""

import torch

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_MANTISSA_BITS = 53


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix64(x: torch.Tensor) -> torch.Tensor:
    """Finaliser of splitmix64 (Steele, Lea and Flood 2014) on int64, which wraps around in torch."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float64, of the shape of `tokens` ([rows, candidates]); `seeds` and `positions` are
    int64 of length rows."""
    rows = mix64(mix64(seeds.to(torch.int64)) + positions.to(torch.int64) * _GOLDEN)
    bits = mix64(rows.unsqueeze(1) + tokens.to(torch.int64) * _GOLDEN)
    uniform = (_shift_right(bits, 64 - _MANTISSA_BITS).to(torch.float64) + 0.5) * 2.0**-_MANTISSA_BITS
    return -torch.log(-torch.log(uniform))


def choose(weights: torch.Tensor, tokens: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One token a row, with probability in proportion to `weights` (the Gumbel-max trick).

    weights, tokens: [rows, candidates]; weights need no normalisation, zero excludes. Returns int32 [rows].
    """
    scores = torch.log(weights.to(torch.float64)) + gumbel_noise(seeds, positions, tokens)
    picked = torch.argmax(scores, dim=1, keepdim=True)
    return torch.gather(tokens, 1, picked).view(-1).to(torch.int32)


def filter_candidates(
    probs: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor | None,
    top_k_bound: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights that top-k, top-p and min-p leave over, and their tokens, by falling probability.

    probs: [rows, vocabulary]. `top_k_bound`, if given, is at least every row's top_k.
    """
    if top_k_bound is not None and top_k_bound < probs.shape[1]:
        weights, tokens = torch.topk(probs, k=top_k_bound, dim=1, sorted=True)
    else:
        weights, tokens = torch.sort(probs, dim=1, descending=True, stable=True)
    mass_before = torch.cumsum(weights, dim=1) - weights
    places = torch.arange(weights.shape[1], device=probs.device).unsqueeze(0)
    kept = (places < top_ks.view(-1, 1)) & (mass_before <= top_ps.view(-1, 1))
    if min_ps is not None:
        kept &= weights >= weights[:, :1] * min_ps.view(-1, 1)
    return torch.where(kept, weights, torch.zeros_like(weights)), tokens
