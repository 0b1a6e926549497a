"""The benchmark of attention: medians, and how many times as much."""

from typing import Any

import pytest

pytest.importorskip("torch")

from meshift.benchmarks.attention import summary


def sample(backend: str, decode: float, prefill: float, identical: bool = True) -> dict[str, Any]:
    return {"backend": backend, "decode_step_ms": decode, "prefill_ms": prefill, "identical": identical}


def test_summary() -> None:
    native = [sample("torch_native", ms, 10 * ms) for ms in (90, 300, 100)]
    ours = [sample("meshift_cpu", ms, 5 * ms) for ms in (40, 50, 1)]
    assert summary([*native, *ours]) == {
        "identical": True,
        "decode_step_ms_torch_native": 100,
        "decode_step_ms_meshift_cpu": 40,
        "decode_step_ratio": 2.5,
        "prefill_ms_torch_native": 1000,
        "prefill_ms_meshift_cpu": 200,
        "prefill_ratio": 5.0,
    }
    assert summary([*native, sample("meshift_cpu", 1, 1, identical=False)])["identical"] is False
