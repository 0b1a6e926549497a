"""`meshift simulate`."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from meshift.services.cli import simulate
from meshift.services.cli.errors import CommandError
from meshift.services.simulation.scenario import Cluster, ScenarioError, Workload

SMALL = ["--instances", "2", "--requests", "60", "--rate", "6", "--quiet"]


def test_policies_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told, plot = tmp_path / "told.json", tmp_path / "plot.svg"
    arguments = [*SMALL, "--trace", "M-M", "--policy", "meshift,round-robin", "--high-share", "0.5"]
    assert simulate.main("simulate", [*arguments, "--json", str(told), "--plot", str(plot)]) == 0
    printed = capsys.readouterr().out
    assert "60 requests of M-M on 2 instances, seed 0" in printed
    assert "round-robin" in printed
    assert "prefill P99, s" in printed
    figures = json.loads(told.read_text())
    assert set(figures["policies"]) == {"meshift", "round-robin"}
    assert figures["policies"]["meshift"]["requests"] == 60
    assert [figures["by_priority"]["meshift"][key]["requests"] for key in ("0", "1")] == [30, 30]
    assert figures["scenario"]["trace"] == "M-M"
    ElementTree.fromstring(plot.read_text())


def test_the_same_again_is_the_same(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("one.json", "two.json")]
    for file in files:
        simulate.main("simulate", [*SMALL, "--trace", "S-S", "--json", str(file)])
    assert files[0].read_text() == files[1].read_text()


def test_a_trace_of_the_user_s(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("arrival_s,input_tokens,output_tokens\n0,10,5\n1,99999,5\n2,20,5\n")
    assert simulate.main("simulate", ["--trace", str(file), "--instances", "1", "--requests", "3", "--quiet"]) == 0
    printed = capsys.readouterr().out
    assert "2 requests of" in printed
    assert "1 of the 3 are missing" in printed


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--trace", "nothing"], "neither a file nor one of S-S"),
        (["--trace", "S-S"], "needs a rate"),
        (["--trace", "S-S", "--rate", "3", "--engine.capacity", "16", "--requests", "1"], "no request"),
        (["--policy", "best", "--rate", "3"], "--policy"),
        (["--rate", "3", "--scheduling.migration.out-below", "400"], "must be below"),
        (["--rate", "3", "--policy", "llumnix", "--scheduling.migration.out-below", "40"], "llumnix: .*must be below"),
    ],
)
def test_what_can_not_be_simulated_is_one_line(arguments: list[str], says: str) -> None:
    with pytest.raises(CommandError, match=says):
        simulate.main("simulate", [*arguments, "--quiet"])


def test_a_broken_trace_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "broken.csv"
    file.write_text("a,b\n1,2\n")
    with pytest.raises(CommandError, match="no format"):
        simulate.main("simulate", ["--trace", str(file)])


def test_results_are_named_by_engine_and_settings_not_by_policy() -> None:
    assert Cluster().parameters_hash() != Cluster(instances=4).parameters_hash()
    llumnix = Cluster.model_validate({"scheduling": {"policy": "llumnix"}})
    assert llumnix.parameters_hash() == Cluster().parameters_hash()


def test_file_without_times_needs_a_rate(tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    talk = [{"conversations": [{"from": "human", "value": "x" * 40}, {"from": "gpt", "value": "y" * 40}]}]
    file.write_text(json.dumps(talk))
    with pytest.raises(ScenarioError, match="rate"):
        Workload(trace=str(file)).arrivals(1000)
    arrivals = Workload(trace=str(file), rate=2.0, requests=5).arrivals(1000)
    assert [(arrival.input_tokens, arrival.output_tokens) for arrival in arrivals] == [(10, 10)] * 5
