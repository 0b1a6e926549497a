"""Makes `sampling.seed` hold.

SGLang honours a seed in its deterministic mode only, which the plain PyTorch attention doesn't have, and there not
together with min-p. Here every request has a seed (the worker draws one for those that come without), and these
functions stand in for the two by which SGLang's `pytorch` sampling backend chooses tokens.
"""

from collections.abc import Callable
from typing import Any

import torch

from meshift.backends.sglang.plugin.gumbel import choose, filter_candidates


def set_seeds(info: Any, batch: Any) -> None:
    """Put each request's seed into the batch's sampling state. Other sampling backends refuse seeds."""
    from sglang.srt.runtime_context import get_exec

    if get_exec().kernel.sampling_backend != "pytorch":
        return
    seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
    info.sampling_seed = torch.tensor(seeds, dtype=torch.int64, device=batch.device)


def sample_plain(
    original: Callable[..., torch.Tensor],
    probs: torch.Tensor,
    sampling_seed: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Around `sampling_from_probs_torch`: no filter."""
    if sampling_seed is None or positions is None:
        return original(probs, sampling_seed, positions)
    tokens = torch.arange(probs.shape[1], device=probs.device).unsqueeze(0).expand_as(probs)
    return choose(probs, tokens, sampling_seed, positions)


def sample_filtered(
    original: Callable[..., Any],
    probs: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    need_min_p_sampling: bool,
    sampling_seed: torch.Tensor | None,
    positions: torch.Tensor,
    *,
    return_filtered_probs: bool = False,
    max_top_k: int | None = None,
) -> Any:
    """Around `top_k_top_p_min_p_sampling_from_probs_torch`."""
    if sampling_seed is None or return_filtered_probs:
        return original(
            probs,
            top_ks,
            top_ps,
            min_ps,
            need_min_p_sampling,
            sampling_seed,
            positions,
            return_filtered_probs=return_filtered_probs,
            max_top_k=max_top_k,
        )
    floor = min_ps if need_min_p_sampling else None
    weights, tokens = filter_candidates(probs, top_ks, top_ps, floor, max_top_k)
    return choose(weights, tokens, sampling_seed, positions)
