"""Penalties and min_new_tokens that know of earlier output, and are the same in every process.

SGLang's penalizers count what a request gives while it decodes. A request that is prefilled again (retracted by
SGLang, or resumed here after another instance) would start from nothing; `replay_output` counts its output in.
"""

from collections.abc import Callable, Sequence
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
    """Count earlier output into the new penalizers of a prefill batch, or of a request that enters with its KV. Does
    nothing for requests without output."""
    enters = batch.forward_mode.is_prebuilt()
    if not (batch.forward_mode.is_extend() or enters):
        return
    orchestrator = info.penalizer_orchestrator
    if orchestrator is None or not orchestrator.is_required:
        return
    for row, request in enumerate(batch.reqs):
        tokens = counted_tokens(request.origin_input_ids, request.output_ids, batch.enable_overlap)
        if enters:
            # The step that follows counts the last token of the output. With the overlap scheduler that is one token
            # too early, and the step after it counts it again.
            request.mesh.skips_count = batch.enable_overlap
            tokens = tokens if batch.enable_overlap else tokens[:-1]
        if tokens:
            _count(orchestrator, row, torch.tensor(tokens, dtype=torch.int64, device=batch.device))


def count_step(original: Callable[[Any], None], batch: Any) -> None:
    """Around `ScheduleBatch.cumulate_penalty_output_tokens`: a step that counts nothing for some requests."""
    rows = [row for row, request in enumerate(batch.reqs) if request.mesh.skips_count]
    penalizers = batch.sampling_info.penalizer_orchestrator.penalizers.values()
    counts = [count for penalizer in penalizers if penalizer.is_prepared() for count in _counts(penalizer)]
    kept = [(count, row, count[row].clone()) for count in counts for row in rows]
    original(batch)
    for count, row, value in kept:
        count[row] = value
    for row in rows:
        batch.reqs[row].mesh.skips_count = False


_COUNTS = (
    "cumulated_frequency_penalties",
    "cumulated_presence_penalties",
    "cumulated_repetition_penalties",
    "len_output_tokens",
)


def _counts(penalizer: Any) -> list[torch.Tensor]:
    """What a penalizer has counted, one row a request."""
    return [getattr(penalizer, name) for name in _COUNTS if hasattr(penalizer, name)]


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
