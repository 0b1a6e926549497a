"""What a rank changes in SGLang, all of it through SGLang's hook registry."""

from typing import Any

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_SAMPLING_INFO = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
_COUNT_STEP = "sglang.srt.managers.schedule_batch.ScheduleBatch.cumulate_penalty_output_tokens"
_RETRACT = "sglang.srt.managers.schedule_batch.ScheduleBatch.retract_decode"
_SAMPLER = "sglang.srt.layers.sampler"
_SAMPLE_PLAIN = f"{_SAMPLER}.sampling_from_probs_torch"
_SAMPLE_FILTERED = f"{_SAMPLER}.top_k_top_p_min_p_sampling_from_probs_torch"

_MAKE_LAYERS = "sglang.srt.utils.common.make_layers"
_FROM_STAGE = "sglang.srt.layers.layer_boundary.stage.StageBoundary.from_pp"

TARGETS = frozenset(
    {_SCHEDULER, _SAMPLING_INFO, _COUNT_STEP, _RETRACT, _SAMPLE_PLAIN, _SAMPLE_FILTERED, _MAKE_LAYERS, _FROM_STAGE}
)


def register() -> None:
    """Register all hooks of a rank."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from meshift.backends.sglang.plugin import penalties, preemption, sampling
    from meshift.backends.sglang.plugin.layers import stack
    from meshift.backends.sglang.plugin.scheduler import MeshScheduler

    HookRegistry.register(_SCHEDULER, MeshScheduler, HookType.REPLACE)
    HookRegistry.register(_SAMPLING_INFO, complete_sampling_info, HookType.AFTER)
    HookRegistry.register(_COUNT_STEP, penalties.count_step, HookType.AROUND)
    HookRegistry.register(_RETRACT, preemption.spare_the_last, HookType.AROUND)
    HookRegistry.register(_SAMPLE_PLAIN, sampling.sample_plain, HookType.AROUND)
    HookRegistry.register(_SAMPLE_FILTERED, sampling.sample_filtered, HookType.AROUND)
    HookRegistry.register(_MAKE_LAYERS, stack.build_all, HookType.AROUND)
    HookRegistry.register(_FROM_STAGE, stack.receive_from_stage, HookType.AROUND)


def check_applied() -> None:
    """Raise RuntimeError if a hook isn't in place: SGLang only logs a plugin that fails."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = TARGETS - set(HookRegistry._patched)
    if missing:
        raise RuntimeError(f"hooks not applied: {', '.join(sorted(missing))}")


def complete_sampling_info(info: Any, cls: type, batch: Any, vocabulary_size: int) -> Any:
    """After SGLang has built a batch's sampling state: give it each request's seed and what its penalties must
    know of earlier output."""
    from meshift.backends.sglang.plugin import penalties, sampling

    sampling.set_seeds(info, batch)
    penalties.fix_order(info)
    penalties.replay_output(info, batch)
    return info
