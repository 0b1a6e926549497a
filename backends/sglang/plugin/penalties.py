"""Penalties and min_new_tokens that know of earlier output, and are the same in every process.

SGLang's penalizers count what a request gives while it decodes. A request that is prefilled again (retracted by
SGLang, or resumed here after another instance) would start from nothing; `replay_output` counts its output in.
"""

from collections.abc import Sequence
from typing import Any

import torch


def counted_tokens(prompt: Sequence[int], output: Sequence[int], overlap: bool) -> list[int]:
    """The tokens that an undisturbed request's penalizers have counted when it samples `output[len(output)]`.

    With the overlap scheduler they lag by one token: a step is prepared before the result of the last one is
    known, so SGLang counts the last prompt token first and each output token a step late.
    """
    if not overlap or not output:
        return list(output)
    return [prompt[-1], *output[:-1]]


def fix_order(info: Any) -> None:
    """Add first, then scale, as the overlap scheduler does. SGLang applies its penalizers in the order of a set of
    classes, which differs from process to process; adding and scaling don't commute."""
    orchestrator = info.penalizer_orchestrator
    if orchestrator is not None:
        by_kind = sorted(
            orchestrator.penalizers.items(), key=lambda item: (item[1].is_multiplicative, item[0].__name__)
        )
        orchestrator.penalizers = dict(by_kind)


def replay_output(info: Any, batch: Any) -> None:
    """Count earlier output into a prefill batch's new penalizers. Does nothing for requests without output."""
    if not batch.forward_mode.is_extend():
        return
    orchestrator = info.penalizer_orchestrator
    if orchestrator is None or not orchestrator.is_required:
        return
    for row, request in enumerate(batch.reqs):
        tokens = counted_tokens(request.origin_input_ids, request.output_ids, batch.enable_overlap)
        if tokens:
            _count(orchestrator, row, torch.tensor(tokens, dtype=torch.int64, device=batch.device))


def _count(orchestrator: Any, row: int, tokens: torch.Tensor) -> None:
    from sglang.srt.sampling import penaltylib

    for kind, penalizer in orchestrator.penalizers.items():
        if not penalizer.is_prepared():
            continue
        if kind is penaltylib.BatchedFrequencyPenalizer:
            steps = penalizer.frequency_penalties[row].expand(len(tokens))
            penalizer.cumulated_frequency_penalties[row].scatter_add_(0, tokens, steps)
        elif kind is penaltylib.BatchedPresencePenalizer:
            penalizer.cumulated_presence_penalties[row][tokens] = penalizer.presence_penalties[row]
        elif kind is penaltylib.BatchedRepetitionPenalizer:
            penalizer.cumulated_repetition_penalties[row][tokens] = penalizer.repetition_penalties[row]
        elif kind is penaltylib.BatchedMinNewTokensPenalizer:
            penalizer.len_output_tokens[row] += len(tokens)
        else:
            raise AssertionError(f"unknown penalizer {kind.__name__}: it would forget earlier output")
