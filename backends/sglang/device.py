"""What the device decides: pages of stacked layers, attention. Pure; nothing of SGLang or torch is imported."""

import json
import math
import os
from pathlib import Path
from typing import Any

from meshift.backends.sglang.plugin.activate import (
    CPU_ATTENTION_NAME,
    FLASH_ATTENTION_NAME,
    TRITON_ATTENTION_NAME,
)
from meshift.backends.sglang.settings import SglangSettings
from meshift.kv_memory.stacking import CUDA_UNIT_BYTES, DEFAULT_PAGE_TOKENS_CPU, page_step

OUR_CUDA_ATTENTION = frozenset({TRITON_ATTENTION_NAME, FLASH_ATTENTION_NAME})

FLASH_PAGE_STEP = 256
"""flash-attn's paged kernel takes pages of a multiple of so many tokens; see `kernels/flash_attention.py`."""

_ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "half": 2, "float": 4}


def has_cuda_driver() -> bool:
    """Whether this host can have a CUDA device, without importing torch."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1")
    return not hidden and Path("/dev/nvidiactl").exists()


def resolved_device(settings: SglangSettings) -> str:
    """`cpu` or `cuda`."""
    return settings.device or ("cuda" if has_cuda_driver() else "cpu")


def page_size(settings: SglangSettings) -> int:
    """Tokens a page: with stacked layers a page fills a unit, so it has more than one token."""
    if settings.layers_per_group is None or settings.page_size != 1:
        return settings.page_size
    return DEFAULT_PAGE_TOKENS_CPU if resolved_device(settings) == "cpu" else cuda_page_step(settings)


def cuda_page_step(settings: SglangSettings) -> int:
    """Pages of a multiple of so many tokens fill units of whole 2 MiB, and suit the attention that was chosen."""
    config: dict[str, Any] = json.loads((settings.model_path / "config.json").read_text())
    query_heads = config["num_attention_heads"]
    heads = max(1, config.get("num_key_value_heads", query_heads) // settings.tensor_ranks)
    head_dim = config.get("head_dim") or config["hidden_size"] // query_heads
    named = settings.dtype or config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    token_stride = (settings.layers_per_group or 1) * 2 * heads * head_dim * _ELEMENT_BYTES.get(named, 2)
    step = page_step(token_stride, CUDA_UNIT_BYTES)
    return math.lcm(step, FLASH_PAGE_STEP) if settings.attention_backend == FLASH_ATTENTION_NAME else step


def check_attention(settings: SglangSettings) -> None:
    """Raise ValueError, which names a setting that works, for an attention backend of ours that can't serve."""
    backend = settings.attention_backend
    device = resolved_device(settings)
    if backend == CPU_ATTENTION_NAME and device == "cuda":
        raise ValueError(
            f"attention_backend={backend} is for CPUs; on a GPU leave it unset, or choose {TRITON_ATTENTION_NAME}"
        )
    if backend not in OUR_CUDA_ATTENTION:
        return
    if device == "cpu":
        raise ValueError(
            f"attention_backend={backend} needs a GPU; on a CPU leave it unset, or choose {CPU_ATTENTION_NAME}"
        )
    if settings.layers_per_group is None:
        raise ValueError(
            f"attention_backend={backend} is for stacked layers: set layers_per_group=4, or leave it unset"
        )
    tokens = page_size(settings)
    if backend == FLASH_ATTENTION_NAME and tokens % FLASH_PAGE_STEP:
        raise ValueError(
            f"attention_backend={backend} needs a page_size that is a multiple of {FLASH_PAGE_STEP}, not {tokens}: "
            f"page_size={cuda_page_step(settings)} works, or attention_backend={TRITON_ATTENTION_NAME}"
        )
