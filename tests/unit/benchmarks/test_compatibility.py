"""The table of what OpenAI's clients get, and the document that has it."""

import re
from pathlib import Path
from typing import Any

import pytest

from meshift.benchmarks.compatibility.__main__ import CLIENTS, outcome
from meshift.benchmarks.compatibility.questions import CHECKS
from meshift.benchmarks.compatibility.table import BEGIN, END, replaced, table, unexplained

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "compatibility.md"
YES: dict[str, Any] = {"passed": True, "why": "", "seconds": 0.1}
NO: dict[str, Any] = {"passed": False, "why": "AssertionError: no", "seconds": 0.1}


def result(server: str, **clients: dict[str, Any]) -> dict[str, Any]:
    return {
        "server": f"{server} 1.0",
        "model": "m",
        "date": "2026-01-02",
        "python": "3.11.2",
        "versions": {"openai": "9.0"},
        "checks": {"chat": "a whole answer", "models": "the list"},
        "results": clients,
    }


RESULTS = [
    result("mesh", openai={"chat": YES, "models": YES}, litellm={"chat": NO}),
    result("other", openai={"chat": YES, "models": NO}, litellm={"missing": True}),
]


def test_a_row_for_each_check_and_a_column_for_each_server_and_client() -> None:
    assert table(RESULTS).splitlines() == [
        "| check | mesh: `openai` | mesh: `litellm` | other: `openai` | other: `litellm` | what is asked |",
        "| --- | --- | --- | --- | --- | --- |",
        "| `chat` | yes | **no** | yes | - | a whole answer |",
        "| `models` | yes | - | **no** | - | the list |",
        "",
        "- mesh 1.0: 2026-01-02, model `m`; Python 3.11.2, openai 9.0.",
        "- other 1.0: 2026-01-02, model `m`; Python 3.11.2, openai 9.0.",
    ]


def test_every_no_wants_its_explanation() -> None:
    assert unexplained(RESULTS, "- `chat`, mesh: it is so.") == ["- `models`, other:"]
    assert unexplained(RESULTS, "- `chat`, mesh: x\n- `models`, other: y") == []


def test_the_table_takes_the_place_of_the_old_one() -> None:
    once = replaced(f"before\n{BEGIN}\n{END}\nafter\n", "| 1 |")
    assert once == f"before\n{BEGIN}\n\n| 1 |\n\n{END}\nafter\n"
    assert replaced(once, "| 2 |") == once.replace("1", "2")
    with pytest.raises(ValueError, match="marks"):
        replaced("no place", "| 1 |")


def test_what_a_client_raises_counts_against_the_answer() -> None:
    def fails() -> None:
        raise RuntimeError("first\nsecond")

    assert (outcome(fails)["passed"], outcome(fails)["why"]) == (False, "RuntimeError: first")
    assert outcome(lambda: None)["passed"]


@pytest.mark.parametrize("kind", CLIENTS)
def test_every_client_has_every_check(kind: type) -> None:
    assert all(callable(getattr(kind, f"check_{name}")) for name in CHECKS)


def test_the_document_has_a_row_for_each_check_and_explains_each_no() -> None:
    text = DOCUMENT.read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", text.partition(BEGIN)[2].partition(END)[0], re.MULTILINE)
    assert [name for name, _ in rows] == list(CHECKS)
    for name, cells in rows:
        assert "**no**" not in cells or f"- `{name}`, " in text
