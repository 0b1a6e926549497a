"""The kernels are checked before they are used, and it is said why they aren't."""

from typing import Any

import pytest

pytest.importorskip("torch")

from meshift.kernels.cpu import check
from meshift.kernels.cpu.build import KernelUnavailable


def test_they_pass() -> None:
    assert check.kernel_problem() is None


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        (KernelUnavailable("no compiler here"), "no compiler here"),
        (OSError("wrong ELF class"), "can't be loaded: wrong ELF class"),
        (0.001, "off by"),
        (float("nan"), "off by nan"),
    ],
    ids=str,
)
def test_they_do_not(trouble: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = getattr(check, "attend")  # noqa: B009

    def troubled(query: Any, place: Any, batch: Any, out: Any, scale: float) -> None:
        if isinstance(trouble, Exception):
            raise trouble
        attend(query, place, batch, out, scale)
        out[3, 1, 7] += trouble

    monkeypatch.setattr(check, "attend", troubled)
    problem = check.kernel_problem()
    assert problem is not None
    assert words in problem
