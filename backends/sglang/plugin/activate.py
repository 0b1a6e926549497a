"""SGLang's entry points into meshift. They act in every SGLang process of the Python environment, so both do nothing
unless our variables are set; importing this module costs nothing."""

import os

CPU_PLATFORM_NAME = "meshift_cpu"
"""The platform's entry point, as in `SGLANG_PLATFORM`."""

CPU_ATTENTION_NAME = "meshift_cpu"
"""Our attention backend, as in `--attention-backend`."""

CPU_PLATFORM_VARIABLE = "MESHIFT_CPU_PLATFORM"
"""`1`: SGLang runs on this host's CPU, without its compiled CPU kernels; good for a stock server too."""

CUDA_PLATFORM_VARIABLE = "MESHIFT_CUDA_PLATFORM"
"""`1`: on a GPU, SGLang's own CUDA platform with our KV pool in it."""

TRITON_ATTENTION_NAME = "meshift_triton"
FLASH_ATTENTION_NAME = "meshift_flash"
"""Our attention backends on a GPU."""

LAYERS_PER_GROUP_VARIABLE = "MESHIFT_LAYERS_PER_GROUP"
"""Set: KV memory lies in units of an arena, so many layers stacked in each."""

CAPACITY_VARIABLE = "MESHIFT_KV_CAPACITY"
"""Set: the KV capacity to start with, in tokens, where SGLang's own setting says how far it may grow."""

MOVABLE_LAYERS_VARIABLE = "MESHIFT_MOVABLE_LAYERS"
"""`1`: every rank builds all layers of the model, those of other stages without memory, so that layers can move."""

LAYER_COPIES_VARIABLE = "MESHIFT_LAYER_COPIES_BYTES"
"""Host memory of each rank for weights of layers that it has had."""

ENGINE_VARIABLE = "MESHIFT_ENGINE"
"""`1`: this process is a rank of a meshift worker. Only the worker sets it, for its ranks."""


def activate_platform() -> str | None:
    """Entry point `sglang.srt.platforms`: the dotted path of our platform class, or None to leave SGLang alone."""
    wants_cpu, wants_cuda = _wants_cpu_platform(), os.environ.get(CUDA_PLATFORM_VARIABLE) == "1"
    if not (wants_cpu or wants_cuda):
        return None
    import torch

    if torch.cuda.is_available():
        is_nvidia = torch.version.hip is None
        return "meshift.backends.sglang.plugin.cuda_platform.MeshCudaPlatform" if wants_cuda and is_nvidia else None
    return "meshift.backends.sglang.plugin.platform.PortableCpuPlatform" if wants_cpu else None


def register_hooks() -> None:
    """Entry point `sglang.srt.plugins`."""
    if _wants_cpu_platform():
        from meshift.backends.sglang.plugin import portability

        portability.register()
    if os.environ.get(CUDA_PLATFORM_VARIABLE) == "1":
        from meshift.backends.sglang.plugin import cuda_attention

        cuda_attention.register()
    if os.environ.get(ENGINE_VARIABLE) == "1":
        from meshift.backends.sglang.plugin import hooks

        hooks.register()


def _wants_cpu_platform() -> bool:
    selected = os.environ.get("SGLANG_PLATFORM", "")
    return os.environ.get(CPU_PLATFORM_VARIABLE) == "1" or selected == CPU_PLATFORM_NAME
