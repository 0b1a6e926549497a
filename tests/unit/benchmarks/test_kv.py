"""The benchmark of KV memory: its figures are what they claim, on a small scale."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from meshift.benchmarks import kv
from meshift.kv_memory.stacking import expected_utilisation

RESULT_KEYS = {"utilisation", "closed_form", "compact_ms_p50", "released_fraction", "resize_ms_p50"}


def test_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv, "COMPACTION_PAGES", 1000)
    monkeypatch.setattr(kv, "PHASES", ((12, 50, 4), (12, 10, 30)))
    path = tmp_path / "kv.json"
    assert kv.main(["--json", str(path), "--quick", "--repeats", "2", "--arena-tokens", "320"]) == 0
    result = json.loads(path.read_text())
    assert set(result) == RESULT_KEYS
    assert set(result["utilisation"]) == set(result["closed_form"]) == {"1", "2", "4", "8"}
    for k, measured in result["utilisation"].items():
        assert measured == pytest.approx(result["closed_form"][k], rel=0.01)
    assert result["released_fraction"] >= 0.98
    assert len((tmp_path / "kv.json.raw.jsonl").read_text().splitlines()) == 4 + 2 + 2


def test_closed_form_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request that holds 3, 4 and 5 tokens in turn."""
    monkeypatch.setattr(kv, "PHASES", ((1, 3, 2),))
    assert kv._held_lengths() == {3: 1, 4: 1, 5: 1}
    assert float(expected_utilisation(1, 4, kv._held_lengths())) == pytest.approx(12 / 16)
    assert float(expected_utilisation(4, 4, kv._held_lengths())) == 1
