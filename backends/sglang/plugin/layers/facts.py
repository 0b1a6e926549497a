"""Whether this rank's layers can move, and what they weigh."""

import os
from pathlib import Path
from typing import Any

from meshift.backends.sglang.plugin.activate import LAYER_COPIES_VARIABLE
from meshift.backends.sglang.plugin.layers.stack import MODEL_PARTS, LayerStack, built
from meshift.backends.sglang.plugin.layers.weights import Checkpoint, HostCopies, LayerWeights
from meshift.backends.sglang.wire_layers import LayerFacts


def make_weights(scheduler: Any) -> LayerWeights | None:
    """None where layers can't move."""
    stack, runner = built(), scheduler.tp_worker.model_runner
    if stack is None or _obstacle(scheduler, stack):
        return None
    copies = HostCopies(int(os.environ.get(LAYER_COPIES_VARIABLE, "0")))
    return LayerWeights(runner.model, stack, Checkpoint(Path(scheduler.server_args.model_path)), copies)


def describe_layers(scheduler: Any, weights: LayerWeights | None) -> LayerFacts:
    """For the worker."""
    stack, pool = built(), scheduler.token_to_kv_pool_allocator.get_kvcache()
    stacking = getattr(pool, "stacking", None)
    if stack is None:
        layers_per_group = 1 if stacking is None else stacking.layers_per_group
        return LayerFacts(layers_per_group=layers_per_group, obstacle="the instance wasn't started for it")
    token_bytes = 2 * pool.head_num * pool.head_dim * pool.store_dtype.itemsize
    model_bytes = sum(one.numel() * one.element_size() for one in scheduler.tp_worker.model_runner.model.parameters())
    own = range(pool.start_layer, pool.start_layer + pool.layer_num)
    return LayerFacts(
        layer_bytes=max(stack.byte_count(layer) for layer in range(len(stack))),
        fixed_bytes=max(0, model_bytes - sum(stack.byte_count(layer) for layer in own)),
        block_bytes=stacking.unit_bytes if stacking is not None else token_bytes * scheduler.page_size,
        layers_per_group=stacking.layers_per_group if stacking is not None else 1,
        obstacle=_obstacle(scheduler, stack) if weights is None else "",
    )


def _obstacle(scheduler: Any, stack: LayerStack) -> str:
    runner, pool = scheduler.tp_worker.model_runner, scheduler.token_to_kv_pool_allocator.get_kvcache()
    inner: Any = getattr(runner.model, "model", None)
    if any(not hasattr(inner, name) for name in MODEL_PARTS) or len(inner.layers) != len(stack):
        return f"a model of kind {type(runner.model).__name__}"
    if not hasattr(pool, "commit_layers"):
        return f"a KV pool of type {type(pool).__name__}"
    if scheduler.model_config.quantization is not None:
        return "quantised weights"
    if not any(Path(scheduler.server_args.model_path).glob("*.safetensors")):
        return "a checkpoint without *.safetensors"
    if str(pool.device) != "cpu":
        return "a GPU, whose graphs hold the layers of the start"
    return ""
