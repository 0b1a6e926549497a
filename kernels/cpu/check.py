"""Whether the compiled kernels can be used here: they are built and compared with their references, once a process."""

import torch

from meshift.kernels.attention import AttentionBatch, attend_reference
from meshift.kernels.cpu.attention import attend
from meshift.kernels.cpu.build import KernelUnavailable
from meshift.kernels.places import KvPlace

ERROR_MAX = 1e-5
"""Of float32 outputs of size 1."""


def kernel_problem() -> str | None:
    """Why they can't; None: they can. Takes milliseconds, and seconds when they must be compiled."""
    try:
        error = _attention_error()
    except KernelUnavailable as unavailable:
        return str(unavailable)
    except OSError as broken:
        return f"the library can't be loaded: {broken}"
    return None if error <= ERROR_MAX else f"the compiled kernel is off by {error:.1e} on this processor"


def _attention_error() -> float:
    """The largest difference to the reference in a small batch: a decode step and a prefill after a prefix."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(8, 6, 40, generator=generator)
    key, value = torch.randn(2, 100, 2, 40, generator=generator)
    slots = torch.randperm(100, generator=generator).to(torch.int32).view(1, 100)
    lengths, rows = torch.tensor([100, 90]), torch.tensor([0, 0])
    batch = AttentionBatch(torch.tensor([0, 1, 8]), lengths, slots, rows)
    out = torch.empty_like(query)
    attend(query, KvPlace.of_buffers(key, value), batch, out, 0.2)
    return float((out - attend_reference(query, key, value, batch, 0.2)).abs().max())
