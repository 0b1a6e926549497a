"""The experiments' own parts: what they run, keep and compare."""

import json
from array import array
from collections.abc import Sequence
from dataclasses import replace
from math import log10
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import pytest

from meshift.backends.sim.parameters import SimParameters
from meshift.benchmarks import simulate
from meshift.benchmarks.experiments import (
    autoscale,
    combined,
    fragmentation,
    priority,
    rates,
    resizing,
    scalability,
    serving,
)
from meshift.benchmarks.experiments.oracle import oracle
from meshift.benchmarks.experiments.runs import Row, Runs, paired
from meshift.benchmarks.experiments.settings import ExperimentSettings
from meshift.services.cli.errors import CommandError
from meshift.services.simulation.arrivals import SinusoidalRate
from meshift.services.simulation.clients import Outcome, make_request
from meshift.services.simulation.scenario import Cluster
from meshift.services.simulation.workload import Arrival, generate
from scripts.find_rates import Search

KNOWN = {"parameters_hash": SimParameters().parameters_hash(), "seeds": {}, "rates": {"M-M": {"10": 8.0}}}


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "rates.json"
    file.write_text(json.dumps(KNOWN))
    monkeypatch.setattr(rates, "FILE", file)
    return file


def row(trace: str, seed: int, policy: str, value: float) -> Row:
    return {"trace": trace, "seed": seed, "policy": policy, "prefill_p99_s": value}


def test_ratios_are_of_the_same_seed() -> None:
    rows = [
        row("a", 1, "meshift", 1.0), row("a", 1, "infaas++", 5.0), row("a", 2, "meshift", 10.0),
        row("a", 2, "infaas++", 20.0), row("a", 3, "meshift", 1.0), row("b", 1, "infaas++", 7.0),
    ]  # fmt: skip
    (ratio,) = paired(rows, ("trace",), "prefill_p99_s", "infaas++")
    assert ratio == {
        "trace": "a", "figure": "prefill_p99_s", "ratio": "infaas++ / meshift",
        "median": 3.5, "least": 2.0, "greatest": 5.0, "seeds": 2,
    }  # fmt: skip
    assert paired(rows, ("trace",), "waited_p99_s", "infaas++") == []


def test_rates_of_another_engine_are_refused(known: Path) -> None:
    assert rates.known_rates(SimParameters()) == {"M-M": {10: 8.0}}
    with pytest.raises(ValueError, match="find the rates anew"):
        rates.known_rates(SimParameters(capacity=100))


def test_the_matrix_is_seed_by_seed(known: Path) -> None:
    known.write_text(json.dumps(KNOWN | {"rates": {name: {"10": 8.0, "5": 7.0} for name in serving.QUICK_TRACES}}))
    quick = serving.cells(ExperimentSettings(quick=True), Cluster())
    assert len(quick) == 3 * 4 * 3
    assert [cell.seed for cell in quick] == sorted(cell.seed for cell in quick)
    assert {cell.seed for cell in quick} == {100, 101, 102, 103}
    assert {cell.target_s for cell in quick} == {10}
    asked = ExperimentSettings(traces=("M-M",), policies=("llumnix",), targets_s=(5,), seeds=2, first_seed=0)
    assert [(cell.trace, cell.rate, cell.seed) for cell in serving.cells(asked, Cluster())] == [
        ("M-M", 7.0, 0),
        ("M-M", 7.0, 1),
    ]
    with pytest.raises(ValueError, match=r"no rate of M-M for 30 s"):
        serving.cells(ExperimentSettings(), Cluster())


def test_a_published_trace_needs_its_file(known: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known.write_text(json.dumps(KNOWN | {"rates": {"M-M": {"10": 8.0}, "seen.csv": {"10": 9.0}}}))
    asked = ExperimentSettings(policies=("meshift",), targets_s=(10,), seeds=1, trace_folder=tmp_path)
    assert [cell.trace for cell in serving.cells(asked, Cluster())] == ["M-M"]
    assert "left out: seen.csv" in capsys.readouterr().out
    (tmp_path / "seen.csv").write_text("arrival_s,input_tokens,output_tokens\n0,20,3\n1,30,2\n")
    here = serving.cells(asked, Cluster())
    assert [cell.trace for cell in here] == ["M-M", "seen.csv"]
    row, _ = serving.run_cell(here[1], Cluster(instances=1), 4, tmp_path)
    assert (row["trace"], row["requests"]) == ("seen.csv", 4)


def test_the_steady_state_leaves_out_what_comes_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("WARM_UP", 10.0), ("SPAN", 20.0), ("AFTER", 5.0)):
        monkeypatch.setattr(serving, f"STEADY_{name}_S", seconds)
    cell, cluster = serving.Cell("S-S", 10, 4.0, 1, "meshift"), Cluster(instances=2)
    row, raw = serving.run_cell(cell, cluster, 1, steady=True)
    whole_row, whole = serving.run_cell(cell, cluster, 140)
    arrivals = generate("S-S", 140, 4.0, 1)
    within = [place for place, arrival in enumerate(arrivals) if 10.0 <= arrival.arrival_s < 30.0]
    assert 50 < len(within) < 110
    assert (row["requests"], whole_row["requests"]) == (len(within), 140)
    for figure in ("prefill_s", "e2e_s"):
        assert raw[figure] == [whole[figure][place] for place in within]


def test_without_classes_the_published_policy_is_its_base() -> None:
    cells = [serving.Cell("M-M", 10, 30.0, 1, policy) for policy in ("llumnix", "llumnix-base")]
    (row, raw), (base_row, base_raw) = (serving.run_cell(cell, Cluster(instances=3), 150) for cell in cells)
    assert raw == base_raw
    assert row == base_row | {"policy": "llumnix"}
    assert row["moves_per_request"] > 0, "nothing was decided"


def test_one_that_is_broken_off_has_what_it_did(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "result.json"
    runs = Runs("serving", "hash", path)
    runs.add(row("a", 1, "meshift", 1.0), {"prefill_s": [1.0]})
    told = json.loads(path.read_text())
    assert (told["parameters_hash"], told["rows"], told["summary"]) == ("hash", [row("a", 1, "meshift", 1.0)], [])
    (raw,) = map(json.loads, (tmp_path / "folder" / "result.json.raw.jsonl").read_text().splitlines())
    assert raw == row("a", 1, "meshift", 1.0) | {"prefill_s": [1.0]}


@pytest.mark.parametrize("name", ["serving", "fragmentation"])
def test_a_small_run_from_end_to_end(
    name: str, known: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "told.json"
    arguments = ["--experiment", name, "--json", str(path), "--requests", "30", "--instances", "2", "--seeds", "1"]
    arguments += ["--traces", "M-M", "--targets-s", "10", "--policies", "meshift,infaas++"]
    assert simulate.main(arguments) == 0
    told = json.loads(path.read_text())
    needed = {
        "trace", "rate", "seed", "policy", "prefill_p99_s", "prefill_mean_s", "decode_p99_ms", "e2e_p99_s",
        "e2e_mean_s", "preemption_loss_s_mean", "moves_per_request", "reversed_moves", "waited_p99_s",
    }  # fmt: skip
    assert all(needed <= set(line) for line in told["rows"])
    assert len(told["rows"]) == (2 if name == "serving" else 4)
    assert len((tmp_path / "told.json.raw.jsonl").read_text().splitlines()) == len(told["rows"])
    assert told["summary"]
    assert "policy" in capsys.readouterr().out or name == "serving"


def test_priorities_are_compared_with_none() -> None:
    cases = {"cv": 4.0, "high_share": 0.1, "urgent_share": 0.0, "reading": "target_load"}
    columns = {f"{name}_{column}": 1.0 for name in ("high", "normal") for column in priority.COLUMNS}
    base = [cases | columns | {"seed": seed, "policy": "llumnix-base"} for seed in (1, 2)]
    ours = [cases | columns | {"seed": seed, "policy": "llumnix", "high_prefill_p99_s": 0.5 * seed} for seed in (1, 2)]
    (line,) = priority.summarise(base + ours)
    assert line["high_prefill_p99_s_gain"] == 1.5
    assert line["normal_e2e_mean_s_gain"] == 1.0


def test_a_small_run_with_priorities(tmp_path: Path) -> None:
    path = tmp_path / "told.json"
    arguments = ["--experiment", "priority", "--quick", "--requests", "30", "--instances", "2", "--json", str(path)]
    assert simulate.main(arguments) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [line["policy"] for line in rows] == ["meshift", priority.BLIND] * 2
    assert all(line["high_prefill_p99_s"] > 0 for line in rows)


def test_a_third_class_has_a_headroom_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(priority, "CASES", priority.CASES[-1:])
    path = tmp_path / "told.json"
    arguments = ["--experiment", "priority", "--requests", "60", "--instances", "2", "--seeds", "1"]
    assert simulate.main([*arguments, "--policies", "llumnix,llumnix-base", "--json", str(path)]) == 0
    told = json.loads(path.read_text())
    assert [line["reading"] for line in told["rows"]] == ["target_load"] * 2 + ["reservation"] * 2
    assert all(line["urgent_share"] == 0.05 and line["urgent_e2e_mean_s"] > 0 for line in told["rows"])
    assert {line["policy"] for line in told["summary"]} == {"llumnix"}
    assert all(line["urgent_e2e_mean_s_gain"] > 0 for line in told["summary"])
    with_three = priority._with_usage(Cluster(), classes=combined.CLASSES).usage
    assert [with_three.headroom(item, 13_616) for item in with_three.classes] == [12_016, 7_216, 0]


def test_what_scheduling_costs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(scalability, "SIZES", ((4, 50), (8, 50)))
    path = tmp_path / "told.json"
    arguments = ["--experiment", "scalability", "--quick", "--no-over-nats", "--json", str(path)]
    assert simulate.main(arguments) == 0
    told = json.loads(path.read_text())
    ways = [*scalability.POLICIES, "meshift, plain scan", "central"]
    assert [(line["instances"], line["policy"]) for line in told["rows"]] == [
        (size, way) for size in (4, 8) for way in ways
    ]
    assert all(line["cpu_s_per_s"] > 0 and line["dispatch_us"] > 0 for line in told["rows"])
    assert [line["instances"] for line in told["summary"]] == [4] * len(ways) + [8] * len(ways)
    assert "meshift, plain scan" in path.with_suffix(".svg").read_text()


def test_a_small_run_that_scales(tmp_path: Path) -> None:
    path = tmp_path / "told.json"
    arguments = [
        "--experiment",
        "autoscale",
        "--quick",
        "--requests",
        "25",
        "--policies",
        "meshift",
        "--json",
        str(path),
    ]
    assert simulate.main(arguments) == 0
    told = json.loads(path.read_text())
    rows = told["rows"]
    assert [(line["figure"], line["threshold"]) for line in rows] == [
        ("ratio", 10.0),
        ("ratio", 300.0),
        ("load", 0.7),
        ("load", 0.9),
        ("load", 1.1),
    ]
    (bound,) = told["oracle"]
    assert bound["instances_paid_mean"] >= 1
    assert bound["instance_s_per_request"] <= min(line["instance_s_per_request"] for line in rows)
    (cold,) = told["cold_starts"]
    assert cold["cold_start_s"] == 30.0
    assert len(cold["curve"]["meshift, load"]) == 3
    assert all(1 <= line["instances_paid_mean"] <= 16 for line in rows)


def test_an_experiment_without_its_rates_is_one_line(known: Path) -> None:
    with pytest.raises(CommandError, match="find_rates"):
        simulate.main(["--experiment", "serving", "--quick"])


def test_the_full_matrices() -> None:
    assert len(autoscale.cases(ExperimentSettings(seeds=1))) == 6 * (3 * (4 + 4) + 2 * 3) * 3, (
        "at 30 s the calm is 60 s"
    )
    assert (
        fragmentation.summarise(
            [row("a", 1, "x", 1.0) | {"fragmented_share": 0.1, "preemption_loss_s_mean": 0.0, "moves_per_request": 0.0}]
        )[0]["fragmented_share"]
        == 0.1
    )


class Known(Search):
    """P99 prefill is a function of rate and seed."""

    def p99_s(self, trace: str, rate: float, seed: int) -> float:
        value: float = 10.0 ** (rate - 5 - 0.1 * seed)
        self.known[trace, rate, seed] = value
        return value


def test_the_search_finds_the_median_seed_s_rate_and_runs_no_seed_in_vain() -> None:
    search = Known(100, range(5), None)
    assert search.find("M-M", 10.0, 4.0, 9.0) == pytest.approx(6.2, rel=0.02)
    rates_tried = {rate for _, rate, _ in search.known}
    assert len(search.known) < 5 * len(rates_tried)


def test_runs_that_are_known_are_not_run_again(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    search = Search(40, [0], path, Cluster(instances=2))
    value = search.p99_s("M-M", 1.0, 0)
    again = Search(40, [0], path)
    again.load()
    assert again.known == {("M-M", 1.0, 0): value}
    other = Search(41, [0], path)
    other.load()
    assert other.known == {}


def test_a_frontier_leaves_out_what_another_threshold_undercuts_in_both() -> None:
    assert autoscale.frontier([(9.0, 8.0), (2.0, 10.0), (5.0, 11.0), (9.0, 9.0)]) == [(2.0, 10.0), (9.0, 8.0)]
    assert autoscale.frontier([]) == []


def test_between_points_instances_follow_the_logarithm_of_the_tail() -> None:
    points = [(1.0, 12.0), (100.0, 8.0), (20.0, 30.0)]
    assert autoscale.instances_at(points, 10.0) == pytest.approx(10.0)
    assert [autoscale.instances_at(points, at) for at in (1.0, 100.0)] == pytest.approx([12.0, 8.0])
    assert [autoscale.instances_at(points, at) for at in (0.9, 101.0)] == [None, None]
    assert autoscale.instances_at(points[:1], 1.0) is None


def test_savings_are_read_where_both_have_the_same_tail() -> None:
    theirs = [(1.0, 20.0), (100.0, 10.0)]
    ours = [(1.0, 10.0), (10.0, 5.0)]
    at_targets = [1 - (10 - 5 * log10(at)) / (20 - 5 * log10(at)) for at in autoscale.TARGETS_S if at <= 10.0]
    assert autoscale.saving_at_equal_p99(ours, theirs) == pytest.approx(median(at_targets))
    assert autoscale.saving_at_equal_p99(theirs, theirs) == 0.0
    assert autoscale.saving_at_equal_p99([(200.0, 2.0), (300.0, 1.0)], theirs) is None
    assert autoscale.saving_at_equal_p99([], theirs) is None


def test_both_are_read_alike() -> None:
    ours, theirs = [(1.5, 11.0), (4.0, 10.0), (30.0, 9.0)], [(1.8, 14.0), (3.0, 15.0), (80.0, 10.0)]
    saved, paid = autoscale.saving_at_equal_p99(ours, theirs), autoscale.saving_at_equal_p99(theirs, ours)
    assert saved is not None
    assert paid is not None
    assert saved > 0 > paid


def test_savings_are_also_read_where_ours_has_the_shorter_tail_throughout() -> None:
    theirs = [(50.0, 10.0), (90.0, 8.0)]
    ours = [(1.0, 9.0), (9.0, 6.0)]
    assert autoscale.saving_at_equal_p99(ours, theirs) is None
    assert autoscale.saving_at_no_greater_p99(ours, theirs) == pytest.approx(0.325)
    assert autoscale.saving_at_no_greater_p99([(60.0, 1.0)], [(50.0, 10.0)]) is None


def _rows(points: Sequence[tuple[str, str, float, float]], rate: float = 2.0, seed: int = 0) -> list[dict[str, Any]]:
    return [
        {"policy": policy, "figure": figure, "threshold": float(number), "calm_s": None, "cold_start_s": 30.0}
        | {"rate": rate, "cv": 1.0, "seed": seed, "prefill_p99_s": p99_s, "instances_paid_mean": paid}
        | {"instance_s_per_request": 5 * paid if policy == "meshift" else 8 * paid, "decode_p99_ms": 50 * p99_s}
        | {"waited_p99_s": 0.5 * p99_s if policy == "meshift" else p99_s}
        for number, (policy, figure, p99_s, paid) in enumerate(points)
    ]


def test_savings_are_those_against_the_same_rule_of_scaling_and_against_the_published_one() -> None:
    points = [
        (policy, figure, p99_s, paid)
        for policy, figure, paid in (
            ("meshift", "load", 8.0),
            ("infaas++", "load", 10.0),
            ("meshift", "ratio", 9.0),
            ("infaas++", "ratio", 16.0),
        )
        for p99_s, paid in ((1.0, paid), (100.0, paid / 2))
    ]
    told = autoscale.curves(_rows(points), 30.0)
    assert told["saving_at_equal_p99"] == pytest.approx({"meshift, load": 0.2, "meshift, ratio": 0.4375})
    assert told["saving_at_equal_p99_against_published"] == pytest.approx(
        {"meshift, load": 0.5, "meshift, ratio": 0.4375}
    )
    assert told["saving_at_no_greater_p99"] == pytest.approx({"meshift, load": 0.2, "meshift, ratio": 0.4375})
    assert told["saving_of_instance_time_at_equal_p99"]["meshift, load"] == pytest.approx(0.5), "1 - 5 * 8 / (8 * 10)"
    assert told["saving_at_equal_decode_p99"] == pytest.approx({"meshift, load": 0.2, "meshift, ratio": 0.4375})
    assert told["saving_at_equal_waited_p99"]["meshift, load"] > 0.25, "half the P99 for the same instances"
    assert told["curve"]["infaas++, load"] == [pytest.approx((1.0, 10.0)), pytest.approx((100.0, 5.0))]


def test_a_saving_is_read_at_each_load_and_then_in_the_median() -> None:
    rows = []
    for rate, paid in ((1.0, 9.0), (2.0, 8.0), (3.0, 4.0)):
        points = [("infaas++", "load", 1.0, 10.0), ("infaas++", "load", 100.0, 5.0)]
        points += [("meshift", "load", 1.0, paid), ("meshift", "load", 100.0, paid / 2)]
        rows += _rows(points, rate)
    told = autoscale.curves(rows, 30.0)
    each = [load["saving_at_equal_p99"]["meshift, load"] for load in told["loads"]]
    assert each == pytest.approx([0.1, 0.2, 0.6])
    assert told["saving_at_equal_p99"]["meshift, load"] == pytest.approx(0.2)


def test_of_several_seeds_a_point_is_the_geometric_mean_of_the_tails_and_the_mean_of_the_instances() -> None:
    rows = _rows([("meshift", "load", 1.0, 10.0)]) + _rows([("meshift", "load", 100.0, 12.0)], seed=1)
    assert autoscale.curves(rows, 30.0)["curve"] == {"meshift, load": [(pytest.approx(10.0), 11.0)]}


ENGINE = SimParameters(capacity=1_600, decode_step_ns=10_000_000, decode_request_ns=0, decode_token_ns=0)
NO_PREFILL = ENGINE.model_copy(update={"prefill_batch_ns": 1, "prefill_token_ns": 0, "prefill_token_squared_ns": 0})


def _arrivals(count: int, inputs: int, outputs: int, gap_s: float = 0.0) -> list[Arrival]:
    return [Arrival(f"r{number}", number * gap_s, inputs, outputs) for number in range(count)]


def test_an_oracle_has_as_many_instances_as_hold_all_tokens() -> None:
    run = oracle(_arrivals(4, 999, 91), NO_PREFILL, 16)
    assert run.virtual_s == 1.0, "90 steps of 10 ms, in whole ticks"
    # 4 * 1,000 tokens and 25 steps more of each at every tick: 4,000 to 4,300, that is 3 times 1,600.
    assert (run.instances_mean, run.instance_s) == (3.0, 3.0)


def test_an_oracle_with_too_few_instances_shares_out_their_steps() -> None:
    free, bound = (oracle(_arrivals(8, 799, 91), NO_PREFILL, most) for most in (16, 2))
    assert free.virtual_s == 1.0
    assert bound.virtual_s == 2.0, "half as fast at first, and slower as the tokens become more"
    assert bound.instances_mean == 2.0


def test_prefills_take_their_time_from_an_oracle_s_steps() -> None:
    slow = NO_PREFILL.model_copy(update={"prefill_batch_ns": 500_000_000})
    # Half of four ticks, and then two whole ones: 4 * 12.5 + 2 * 25 steps.
    assert oracle(_arrivals(1, 99, 91), slow, 16).virtual_s == 1.5


def test_an_oracle_that_has_nothing_to_do_has_one_instance_and_ends() -> None:
    assert oracle(_arrivals(2, 10, 1, gap_s=10.0), NO_PREFILL, 16).instances_mean == 1.0
    assert oracle([], NO_PREFILL, 16).instance_s == 0.0


def test_everything_at_once(tmp_path: Path) -> None:
    path = tmp_path / "told.json"
    arguments = ["--experiment", "combined", "--quick", "--requests", "20", "--policies", "meshift"]
    assert simulate.main([*arguments, "--json", str(path)]) == 0
    told = json.loads(path.read_text())
    assert [line["policy"] for line in told["rows"]] == ["meshift"]
    needed = {"violations_urgent", "violations_high", "violations_normal", "moved_often_share", "reversed_share"}
    assert all(needed | {"overloaded_s_max"} <= set(line) for line in told["summary"])
    assert path.with_suffix(".svg").exists()


def test_a_tenth_of_the_prompts_is_five_times_as_long_and_classes_have_their_shares() -> None:
    arrivals = combined.arrivals(1_000, 3, 10**9)
    plain = generate("M-M", 1_000, SinusoidalRate(5.0, 0.6, 400.0), 3, 4.0)
    longer = [new.input_tokens / old.input_tokens for new, old in zip(arrivals, plain, strict=True)]
    assert (longer.count(5.0), longer.count(1.0)) == (100, 900)
    counts = [sum(arrival.priority == priority for arrival in arrivals) for priority in (0, 1, 2)]
    assert counts == [800, 150, 50]
    ways = {name: cluster for name, _, cluster in combined.ways(Cluster(), ())}
    assert list(ways) == [
        "meshift",
        "llumnix",
        "infaas++",
        "meshift, gradual",
        "meshift, scaled as published",
        "meshift, maximum",
    ]
    assert ways["meshift, gradual"].scheduling.migration.inflate_over_s == combined.GRADUAL_S
    assert ways["meshift, maximum"].usage.combination == "maximum"
    assert all(way.scheduling.scaling.enabled for way in ways.values())


def test_a_promise_counts_from_when_the_prompt_alone_could_have_begun() -> None:
    request = make_request(Arrival("r", 0.0, 1_000, 3), "m", Random(1))
    engine = SimParameters()
    alone_s = engine.prefill_ns(1_000, 1_000_000) / 1e9
    first_s = alone_s + combined.PROMISES[0].queueing_s
    outcome = Outcome(request, 0.0, first_s - 0.01, first_s + 0.09, array("i", [1, 2, 3]))
    assert not combined.misses(outcome, engine)
    assert combined.misses(replace(outcome, first_s=first_s + 0.01), engine)
    assert combined.misses(replace(outcome, last_s=first_s + 0.4), engine)


def test_capacity_grows_with_the_layout_unless_that_is_left_out() -> None:
    """A small run of each mode: the tokens are the same, the room isn't."""
    rows = {mode: resizing.measure(resizing.Run(mode, 2.0, 40, 0))[0] for mode in resizing.MODES}
    assert rows["resize"]["capacity_tokens"] > 4 * rows["no-resize"]["capacity_tokens"]
    assert rows["no-resize"]["capacity_tokens"] == rows["static"]["capacity_tokens"]
    assert rows["static"]["change_s"] is None
    assert 2.0 < rows["resize"]["change_s"] < 4.0, "twenty layers of 0.875 GB at 8 GB/s"
    assert rows["resize"]["tokens_per_s"] > rows["static"]["tokens_per_s"]
    assert resizing.ratio_of(3.0, 0.0) is None
    assert resizing.ratio_of(3.0, 1.5) == 2.0
