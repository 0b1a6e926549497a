"""The attention backend checks its kernel at start and falls back with one clear line."""

import logging
from typing import Any

import pytest

pytest.importorskip("sglang")

from meshift.backends.sglang.plugin import attention
from meshift.kernels.cpu.build import KernelUnavailable


class FakeRunner:
    """As much of a model runner as a backend keeps."""

    class Pool:
        use_hnd = False
        is_quantized_kv_cache = False

        def set_kv_buffer(self) -> None:
            return None

    device = "cpu"
    req_to_token_pool = None
    token_to_kv_pool = Pool()


def test_the_kernel_passes_its_check() -> None:
    attention.check_kernel()
    assert type(attention.make_backend(FakeRunner())) is attention.MeshCpuAttention


@pytest.mark.parametrize("trouble", ["no compiler", "wrong numbers"])
def test_falls_back(trouble: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def attend(query: Any, place: Any, batch: Any, out: Any, scale: float) -> None:
        if trouble == "no compiler":
            raise KernelUnavailable("no compiler here")
        out.fill_(float("nan"))

    monkeypatch.setattr(attention, "attend", attend)
    with caplog.at_level(logging.WARNING):
        backend = attention.make_backend(FakeRunner())
    assert not isinstance(backend, attention.MeshCpuAttention)
    (line,) = caplog.messages
    assert "torch_native" in line
    assert ("no compiler here" if trouble == "no compiler" else "off by nan") in line
