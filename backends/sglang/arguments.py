"""From settings to SGLang's server arguments and the ranks' environment. Pure; nothing of SGLang is imported."""

import json
import os
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from meshift.backends.sglang.device import OUR_CUDA_ATTENTION, check_attention, page_size, resolved_device
from meshift.backends.sglang.plugin.activate import (
    CAPACITY_VARIABLE,
    CPU_ATTENTION_NAME,
    CPU_PLATFORM_NAME,
    CPU_PLATFORM_VARIABLE,
    CUDA_PLATFORM_VARIABLE,
    ENGINE_VARIABLE,
    LAYER_COPIES_VARIABLE,
    LAYERS_PER_GROUP_VARIABLE,
    MOVABLE_LAYERS_VARIABLE,
)
from meshift.backends.sglang.settings import SglangSettings
from meshift.kv_memory.layout import split_evenly

CHUNKED_PREFILL_TOKENS_CPU = 512
RUNNING_REQUESTS_MAX_CPU = 256
DECODE_LOG_STEPS = 1000
COMPUTE_NICENESS = 5
"""Of a rank's computing threads. On full cores the worker and the rank's own sockets must not wait behind them."""

PARTITION_VARIABLE = "SGLANG_PP_LAYER_PARTITION"
"""Layers of each stage, as SGLang takes them."""

RANKS_OWN_VARIABLES = (
    PARTITION_VARIABLE,
    CAPACITY_VARIABLE,
    LAYERS_PER_GROUP_VARIABLE,
    MOVABLE_LAYERS_VARIABLE,
    LAYER_COPIES_VARIABLE,
)
"""Read by a rank when it starts, and by no import."""

WATCHDOG_S = 24 * 3600
"""The worker judges whether an engine hangs; SGLang's own watchdog would only end it without a reason."""


def server_arguments(settings: SglangSettings) -> dict[str, Any]:
    """Keyword arguments of SGLang's `ServerArgs`. The same on all ranks; nothing random is left to them. Raises
    ValueError for settings that can't serve together."""
    check_attention(settings)
    arguments: dict[str, Any] = {
        "model_path": str(settings.model_path),
        "served_model_name": settings.model_name,
        "tp_size": settings.tensor_ranks,
        "pp_size": settings.pipeline_stages,
        "page_size": page_size(settings),
        "disable_radix_cache": not settings.radix_cache,
        "random_seed": settings.random_seed,
        "log_level": settings.log_level,
        "decode_log_interval": DECODE_LOG_STEPS,
        "watchdog_timeout": WATCHDOG_S,
        "sleep_on_idle": True,
        "grammar_backend": "xgrammar",
        # Our sampler (plugin/sampling.py) stands behind this one only.
        "sampling_backend": "pytorch",
        # A greater priority goes first, and never takes the place of a running request.
        "enable_priority_scheduling": True,
        "disable_priority_preemption": True,
        "default_priority_value": 0,
        "schedule_policy": "fcfs",
    }
    arguments |= _device_arguments(settings)
    optional = {
        "max_total_tokens": settings.capacity_tokens_max or settings.capacity_tokens,
        "context_length": settings.context_tokens_max,
        "max_running_requests": settings.max_running_requests,
        "chunked_prefill_size": settings.chunked_prefill_size,
        "dtype": settings.dtype,
        "attention_backend": settings.attention_backend,
        "disable_overlap_schedule": None if settings.overlap is None else not settings.overlap,
    }
    arguments |= {name: value for name, value in optional.items() if value is not None}
    return arguments | settings.extra_server_args


def layer_partition(settings: SglangSettings) -> tuple[int, ...] | None:
    """Layers of each stage, if SGLang shall not choose: with stacked layers a split is at a group's boundary."""
    if settings.layer_partition is not None or settings.layers_per_group is None or settings.pipeline_stages == 1:
        return settings.layer_partition
    layers = json.loads((settings.model_path / "config.json").read_text())["num_hidden_layers"]
    k = settings.layers_per_group
    bounds = [min(end * k, layers) for _, end in split_evenly(-(-layers // k), settings.pipeline_stages)]
    return tuple(end - start for start, end in pairwise([0, *bounds]))


def _device_arguments(settings: SglangSettings) -> dict[str, Any]:
    if resolved_device(settings) == "cuda":
        # Ours aren't captured into CUDA graphs.
        graphs = {"disable_cuda_graph": True} if settings.attention_backend in OUR_CUDA_ATTENTION else {}
        return {"device": "cuda", "disable_overlap_schedule": settings.pipeline_stages > 1, **graphs}
    return {
        "device": "cpu",
        "attention_backend": CPU_ATTENTION_NAME,
        "dtype": "float32",
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "chunked_prefill_size": CHUNKED_PREFILL_TOKENS_CPU,
        "max_running_requests": RUNNING_REQUESTS_MAX_CPU,
        # Only bounds a pool that `max_total_tokens` sizes.
        "mem_fraction_static": 0.5,
    }


def rank_environment(settings: SglangSettings, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of a rank process, made from the worker's."""
    environment = dict(base)
    environment |= {ENGINE_VARIABLE: "1", "SGLANG_USE_PICKLE_IPC": "0", "PYTHONUNBUFFERED": "1"}
    if settings.model_path.exists():
        environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    partition = layer_partition(settings)
    if partition is not None:
        environment[PARTITION_VARIABLE] = ",".join(map(str, partition))
    if settings.capacity_tokens_max is not None and settings.capacity_tokens is not None:
        environment[CAPACITY_VARIABLE] = str(settings.capacity_tokens)
    if resolved_device(settings) == "cpu":
        environment |= _cpu_environment(settings, base)
        if settings.layers_move:
            environment |= {
                MOVABLE_LAYERS_VARIABLE: "1",
                LAYER_COPIES_VARIABLE: str(settings.layer_copies_bytes),
            }
    elif settings.layers_per_group is not None:
        environment[CUDA_PLATFORM_VARIABLE] = "1"
    if settings.layers_per_group is not None:
        environment[LAYERS_PER_GROUP_VARIABLE] = str(settings.layers_per_group)
    return environment


def _cpu_environment(settings: SglangSettings, base: Mapping[str, str]) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0))
    threads = settings.threads_per_rank or max(1, cores // settings.rank_count)
    return {
        CPU_PLATFORM_VARIABLE: "1",
        "SGLANG_PLATFORM": CPU_PLATFORM_NAME,
        "OMP_NUM_THREADS": str(threads),
        # Instances share the cores; a thread that waits must not spin on one.
        "OMP_WAIT_POLICY": base.get("OMP_WAIT_POLICY", "PASSIVE"),
        # Compiling SGLang's few compiled functions takes seconds and a C++ compiler, and gains nothing here.
        "TORCHDYNAMO_DISABLE": "1",
        "GLOO_SOCKET_IFNAME": base.get("GLOO_SOCKET_IFNAME", "lo"),
    }
