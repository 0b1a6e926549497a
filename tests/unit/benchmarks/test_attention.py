"""The benchmark of attention: what its figures are made of."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from meshift.benchmarks import attention, attention_kernels  # noqa: E402
from meshift.benchmarks.attention_kernels import Case  # noqa: E402


def kernel(case: str, number: int, native: float, contiguous: float, table: float) -> list[dict[str, Any]]:
    times = {"torch_native": native, "contiguous": contiguous, "table": table}
    return [{"case": case, "round": number, "subject": who, "ms": ms} for who, ms in times.items()]


KERNELS = [
    *kernel("512", 0, 30, 10, 10),
    *kernel("512", 1, 40, 20, 11),
    *kernel("512", 2, 50, 10, 12),
    *kernel("2048", 0, 100, 20, 25),
    *kernel("extend", 0, 30, 10, 15),
    *kernel("extend after as many", 0, 90, 10, 15),
]
ENGINES = [
    {"context": context, "backend": backend, "step_ms": ms}
    for context, backend, ms in [
        (256, "torch_native", 90.0),
        (256, "meshift_cpu", 50.0),
        (256, "torch_native", 110.0),
        (256, "meshift_cpu", 40.0),
        (1024, "torch_native", 300.0),
        (1024, "meshift_cpu", 100.0),
    ]
]


def test_summary() -> None:
    expected = {
        "table_over_contiguous": 1.25,
        "decode_speedup": {"512": 3.64, "2048": 4.0},
        "extend_speedup": 2.0,
        "engine_decode_speedup": {"256": 2.22, "1024": 3.0},
    }
    assert attention.summary([*KERNELS, *ENGINES]) == expected
    engines = expected.pop("engine_decode_speedup")
    assert attention.summary(KERNELS) == expected
    assert attention.summary(ENGINES) == {"engine_decode_speedup": engines}
    assert len(attention.charts(ENGINES)) == 1


def test_table_and_charts() -> None:
    samples = [*KERNELS, *ENGINES]
    rows = dict(attention.table(attention.summary(samples), samples))
    assert rows["table over contiguous"] == "1.25 (aim: at most 1.02)"
    assert rows["decode, 512 tokens x 8"].startswith("3.64 x (aim: 3.5): torch_native 40.00 ms, contiguous 10.00 ms")
    rows = dict(attention.engine_table(samples))
    assert rows["engine, 1024 tokens x 8"].endswith("(aim: 1.8): torch_native 300.0 ms, meshift_cpu 100.0 ms")
    kernels, engines = attention.charts(samples)
    assert kernels.series["table"] == [11, 25]
    assert engines.series == {"torch_native": [100.0, 300.0], "meshift_cpu": [45.0, 100.0]}


@pytest.mark.parametrize("case", [Case("decode", 3, 40), Case("extend", 1, 37, 20)])
def test_the_subjects_compute_the_same(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    monkeypatch.setattr(attention_kernels, "_native", reference)
    samples = attention_kernels.measure(case, 2, random.Random(seed))
    assert [sample["subject"] for sample in samples] == [name for order in attention_kernels.ORDERS for name in order]
    assert all(sample["ms"] > 0 for sample in samples)


def test_a_subject_that_computes_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(case: Case, *rest: Any) -> Any:
        run = reference(case, *rest)
        return lambda: run() + 0.01

    monkeypatch.setattr(attention_kernels, "_native", wrong)
    with pytest.raises(AssertionError, match="don't agree"):
        attention_kernels.measure(Case("decode", 3, 40), 1, random.Random(0))


def test_without_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernels, "_native", reference)
    for name in ("DECODES", "EXTENDS"):
        small = [Case(case.name, 2, 32, min(case.queries, 8)) for case in getattr(attention, name)]
        monkeypatch.setattr(attention, name, small)
    path = tmp_path / "attention.json"
    assert attention.main(["--kernels-only", "--rounds", "2", "--json", str(path)]) == 0
    assert set(json.loads(path.read_text())) == {"table_over_contiguous", "decode_speedup", "extend_speedup"}
    assert len((tmp_path / "attention.json.raw.jsonl").read_text().splitlines()) == 4 * 2 * 5
    assert "<svg" in (tmp_path / "attention.json.svg").read_text()


def reference(case: Case, buffers: list[Any], query: Any, batch: Any) -> Any:
    """In place of SGLang's backend, which takes seconds to import."""
    from meshift.kernels.attention import attend_reference

    key, value = buffers[-1]
    return lambda: attend_reference(query, key, value, batch, attention_kernels.HEAD_DIM**-0.5)
