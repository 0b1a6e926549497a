"""Hooks that any SGLang process on our CPU platform needs."""


def register() -> None:
    """Leave OpenMP's threads where `OMP_NUM_THREADS` puts them.

    SGLang binds a rank to a NUMA node: that refuses more ranks than nodes, and on ARM and AMX hosts it calls a
    kernel of the compiled CPU package.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    bootstrap = "sglang.srt.distributed.bootstrap"
    HookRegistry.register(f"{bootstrap}._bind_threads_if_cpu", _no_binding, HookType.REPLACE)
    HookRegistry.register(f"{bootstrap}._init_cpu_threads_env", _no_threads_environment, HookType.REPLACE)


def _no_binding(*, device: str) -> None:
    return None


def _no_threads_environment(*, local_omp_cpuid: list[int] | None, dist_init_method: str | None = None) -> None:
    return None
