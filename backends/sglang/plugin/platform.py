"""SGLang on any CPU: plain PyTorch kernels, gloo between ranks."""

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from meshift.backends.sglang.plugin.activate import CPU_ATTENTION_NAME


class PortableCpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
    """An out-of-tree platform. SGLang's in-tree CPU mode needs a compiled kernel package that isn't on PyPI."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def is_pin_memory_available(self, device: torch.device | None = None) -> bool:
        """No device to pin host memory for."""
        return False

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        """Ours for plain K and V."""
        if kind != "mha":
            return None
        from meshift.backends.sglang.plugin.pool import pool_class

        return pool_class()

    def get_default_attention_backend(self) -> str:
        """Our own; it falls back to SGLang's `torch_native` by itself."""
        return CPU_ATTENTION_NAME
