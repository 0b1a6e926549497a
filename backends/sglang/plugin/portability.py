"""Hooks that any SGLang process on our CPU platform needs."""

from typing import Any

from meshift.backends.sglang.plugin.activate import CPU_ATTENTION_NAME


def register() -> None:
    """All of them."""
    _free_threads()
    _register_attention()


def _free_threads() -> None:
    """Leave OpenMP's threads where `OMP_NUM_THREADS` puts them.

    SGLang binds a rank to a NUMA node: that refuses more ranks than nodes, and on ARM and AMX hosts it calls a
    kernel of the compiled CPU package.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    bootstrap = "sglang.srt.distributed.bootstrap"
    HookRegistry.register(f"{bootstrap}._bind_threads_if_cpu", _no_binding, HookType.REPLACE)
    HookRegistry.register(f"{bootstrap}._init_cpu_threads_env", _no_threads_environment, HookType.REPLACE)


def _register_attention() -> None:
    """Our attention backend, under its name. SGLang takes every backend whose name it doesn't know for one of Triton,
    and would look up last slots with it."""
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    add_attention_backend_choices([CPU_ATTENTION_NAME])
    register_attention_backend(CPU_ATTENTION_NAME)(_make_attention)
    HookRegistry.register("sglang.srt.mem_cache.allocation.get_last_loc", _last_slots, HookType.REPLACE)


def _make_attention(model_runner: Any) -> Any:
    from meshift.backends.sglang.plugin.attention import make_backend

    return make_backend(model_runner)


def _last_slots(req_to_token: Any, rows: Any, prefix_lens: Any) -> Any:
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(req_to_token, rows, prefix_lens)


def _no_binding(*, device: str) -> None:
    return None


def _no_threads_environment(*, local_omp_cpuid: list[int] | None, dist_init_method: str | None = None) -> None:
    return None
