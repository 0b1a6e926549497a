"""`meshift bench` finds benchmarks in its table."""

import sys
import types

import pytest

from meshift.services.cli import bench
from meshift.services.cli.bench import Benchmark
from meshift.services.cli.main import main


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Two benchmarks; the first fails."""
    calls: list[list[str]] = []

    def add(name: str, status: int) -> None:
        def bench_main(arguments: list[str]) -> int:
            calls.append(arguments)
            return status

        module = types.ModuleType(f"bench_{name}")
        vars(module)["main"] = bench_main
        monkeypatch.setitem(sys.modules, module.__name__, module)

    add("good", 0)
    add("bad", 3)
    table = {"bad": Benchmark("bench_bad", "fails"), "good": Benchmark("bench_good", "works")}
    monkeypatch.setattr(bench, "BENCHMARKS", table)
    return calls


def test_one_by_name(calls: list[list[str]]) -> None:
    assert main(["bench", "good", "--quick"]) == 0
    assert calls == [["--quick"]]


def test_all_of_them(calls: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 3
    assert calls == [[], []]
    assert "== good: works" in capsys.readouterr().out


def test_an_unknown_name(calls: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "ugly"]) == 2
    assert "no benchmark 'ugly'" in capsys.readouterr().err
    assert calls == []
