"""The rebalance benchmark's figures, from samples that are made up."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshift.benchmarks import rebalance
from meshift.benchmarks.rebalance import RebalanceSettings, altered, ratios, result_of, row_of, verdict
from meshift.benchmarks.report import write_result

Sample = dict[str, Any]


def request(pair: int, moves: bool, number: int, ttft_s: float, e2e_s: float, **changes: Any) -> Sample:
    return {
        "measure": "request",
        "pair": pair,
        "moves": moves,
        "request": number,
        "long": number % 2 == 0,
        "begin_ns": 1_000_000_000 + number * 10_000_000,
        "ttft_s": ttft_s,
        "e2e_s": e2e_s,
        "moved": False,
        "first_on": "worker-1" if number % 2 == 0 else "worker-2",
        "last_on": "worker-1",
        "output": [number, 1, 2],
        "text": f"text {number}",
    } | changes


def a_run() -> list[Sample]:
    """Two pairs of four requests; with moves everything takes a half in the first pair, and a third in the second."""
    samples = [{"measure": "circumstances", "settings": {"burst": 2}, "cores": 2, "others_cores": 0.05}]
    for pair, factor in ((0, 2.0), (1, 3.0)):
        for number in range(4):
            samples.append(request(pair, False, number, 1.2 * (number + 1), 6.0 * (number + 1)))
            changed = {"moved": number == 2, "last_on": "worker-2" if number == 2 else "worker-1"}
            samples.append(
                request(pair, True, number, 1.2 * (number + 1) / factor, 6 * (number + 1) / factor, **changed)
            )
    return samples


def test_ratios_are_of_each_pair() -> None:
    result = result_of(a_run())
    found = {row["figure"]: (row["least"], row["median"], row["greatest"], row["pairs"]) for row in result["ratios"]}
    for figure in ("ttft_p99_s", "ttft_mean_s", "e2e_p99_s", "e2e_mean_s"):
        assert found[figure] == pytest.approx((2.0, 2.5, 3.0, 2)), figure
    assert 2.0 < found["span_s"][1] < 3.0
    assert result["identical"] is True


def test_a_row_tells_of_one_round() -> None:
    rows = result_of(a_run())["rows"]
    assert [(row["pair"], row["moves"]) for row in rows] == [(0, "off"), (0, "on"), (1, "off"), (1, "on")]
    off, on = rows[:2]
    assert off["ttft_p99_s"] == pytest.approx(4.8)
    assert off["e2e_mean_s"] == pytest.approx(15.0)
    assert off["span_s"] == pytest.approx(24.03)
    assert (off["moved"], on["moved"]) == (0, 1)
    assert (on["long_at_first"], on["long_at_last"]) == (2, 1)


def test_a_pair_that_is_half_there_has_no_ratio() -> None:
    members = [request(0, True, number, 1.0, 2.0) for number in range(2)]
    assert ratios([row_of(0, True, members)]) == []


@pytest.mark.parametrize("change", [{"text": "other"}, {"output": [9]}])
def test_an_output_that_differs_anywhere_is_named(change: Sample) -> None:
    samples = a_run()
    samples[-2] |= change
    result = result_of(samples)
    assert (result["identical"], result["altered"]) == (False, [samples[-2]["request"]])
    assert any("wrong: requests" in line for line in verdict(result))
    assert altered(a_run()[1:]) == []


def test_what_makes_figures_worthless_is_said() -> None:
    samples = a_run()
    samples[0]["others_cores"] = 0.7
    for sample in samples[1:]:
        sample["moved"] = False
    said = "\n".join(verdict(result_of(samples)))
    assert "others used 0.70 cores" in said
    assert "nothing moved" in said
    assert verdict(result_of(a_run())) == ["all outputs are the same in all rounds"]


def test_the_figures_follow_from_the_raw_samples(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    samples = a_run()
    write_result(path, result_of(samples), samples)
    raw = [json.loads(line) for line in (tmp_path / "r.json.raw.jsonl").read_text().splitlines()]
    assert result_of(raw) == json.loads(path.read_text())


def test_long_and_short_requests_come_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    def prompt(tokenizer: object, tokens: int, first: str) -> list[int]:
        return [len(first)] * tokens

    monkeypatch.setattr(rebalance, "prompt_of", prompt)
    settings = RebalanceSettings(burst=3, long_tokens=50, short_tokens=5, prompt_tokens=9)
    burst = rebalance.Burst.of(settings, None)  # type: ignore[arg-type]
    assert burst.outputs == (50, 5, 50, 5, 50, 5)
    assert [len(item) for item in burst.prompts] == [9] * 6
